// The backend of csrc/kernels/matmul/pad.cu: an operand whose rows no kernel can read 16 bytes at a
// time is copied first, to rows that begin at whole lines of the cache, and the product then goes
// to whichever kernels are quickest for that. The copy runs at the memory's speed; kernels that
// read by elements run at a fraction of the aligned ones'. Rows that are aligned, but not to lines,
// are copied where the models say that it pays.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "kernels/matmul/pad_params.h"
#include "ops/common/launch.h"
#include "ops/common/spread_blocks.h"
#include "ops/matmul/backend.h"
#include "ops/matmul/plan.h"

namespace torch_cubin {
namespace {

constexpr int64_t kPadBlockChunks = 1024;  // of a kernel's block
// Bytes of copies that a product may take beside its operands and its output.
constexpr int64_t kMostPadBytes = int64_t{2} << 30;
// A batch-invariant product is copied, or not, whatever its number of rows; up to here the kernel's
// 32-bit counts of chunks are enough.
constexpr int64_t kMostChunkBytes = int64_t{16} << 30;

constexpr int64_t kMostColumns = int64_t{1} << 31;  // of a row: the kernel's are 32-bit

// Multiplications below which a second launch costs more than slow reads.
constexpr int64_t kLeastPaddedWork = int64_t{1} << 24;

// An operand as rows of the dim whose stride is 1.
struct PaddedOperand {
  int64_t batch, rows, columns;
  int64_t row_stride, batch_stride;  // elements of the operand

  // 16-byte chunks of a row of the copy, and from one row to the next.
  int64_t chunks(int64_t element_bytes) const {
    return ceil_div(columns * element_bytes, kVectorBytes);
  }
  int64_t row_chunks(int64_t element_bytes) const {
    return ceil_div(columns * element_bytes, kLineBytes) * (kLineBytes / kVectorBytes);
  }
  int64_t bytes(int64_t element_bytes) const {
    return batch * rows * row_chunks(element_bytes) * kVectorBytes;
  }
  bool is_like(const PaddedOperand& y) const {
    return batch == y.batch && rows == y.rows && columns == y.columns &&
           row_stride == y.row_stride && batch_stride == y.batch_stride;
  }
};

// Which operands a plan copies.
struct PadPlan {
  bool a, b;
};

class PadKernels : public MatmulKernels {
 public:
  PadKernels(const Device& device, const std::vector<PackageKernel*>& kernels) : device_(device) {
    for (PackageKernel* kernel : kernels) {
      const KernelFields fields(*kernel);
      const int64_t bytes = fields.integer("alignment", 2, 4);
      (bytes == 2 ? of_2_bytes_ : of_4_bytes_) = {kernel, SpreadBlocks(fields)};
      cost_ = CopyCost(fields);
      second_ = fields.object("cost").number("second", 0);
    }
  }

  static void check(PackageKernel& kernel) {
    const KernelFields fields(kernel);
    fields.integer("alignment", 2, 4);
    CopyCost{fields};  // throws for a figure that is wrong
    SpreadBlocks{fields};
  }

  void configs(const MatmulCase& c, MatmulConfigs& out) const override {
    const double work = static_cast<double>(c.batch) * c.m * c.n * c.k;
    if (kernel_for(element_size(c.input)).kernel == nullptr || c.batch_dims > 1 || c.split_sums ||
        c.sums_rows() || (work < kLeastPaddedWork && !c.batch_invariant)) {
      return;
    }
    const bool must_a = !is_vectors(c.a), must_b = !is_vectors(c.b);
    for (const bool a : {false, true}) {
      for (const bool b : {false, true}) {
        if ((must_a && !a) || (must_b && !b) || (!a && !b)) continue;
        if (c.batch_invariant && (a != must_a || b != must_b)) continue;
        if ((a && (c.a_lines || !c.a_unit)) || (b && (c.b_lines || !c.b_unit))) continue;
        rewrite(c, {a, b}, out);
      }
    }
  }

  // What follows the copy is chosen by itself.
  std::string name(const MatmulPlan& plan) const override {
    const auto chosen = plan.get<PadPlan>();
    return std::string("pad ") + (chosen.a ? "a" : "") + (chosen.b ? "b" : "");
  }

  void launch(const MatmulPlan& plan, const MatmulProblem& p,
              const MatmulOperands& operands) const override {
    const MatmulCase c = matmul_case(p, operands);
    const auto chosen = plan.get<PadPlan>();
    const int64_t bytes = element_size(p.input);
    MatmulProblem aligned = p;
    aligned.k_parts = c.k_parts;  // kernels without a copy may run it for other numbers of rows
    MatmulOperands copies = operands;
    PadParams params{};
    std::vector<Workspace> memory;
    PaddedOperand first{};
    int jobs = 0;
    const auto copy = [&](Access access, const char*& data, int64_t own, int64_t& own_stride,
                          int64_t& k_stride, int64_t* batch_stride) {
      const bool along_k = is_along_k(access);
      const bool several = p.batch_dims == 1 && batch_stride[0] != 0;
      PaddedOperand x;
      x.batch = several ? p.batch_size[0] : 1;
      x.rows = along_k ? own : p.k;
      x.columns = along_k ? p.k : own;
      x.row_stride = along_k ? own_stride : k_stride;
      x.batch_stride = several ? batch_stride[0] : 0;
      const int64_t columns = x.row_chunks(bytes) * kVectorBytes / bytes;
      // A matrix times itself, or its transpose, is copied once.
      const bool copied = c.symmetric && jobs == 1 && x.is_like(first);
      if (!copied) {
        first = x;
        memory.emplace_back(device_, x.bytes(bytes));
        fill_job(params.jobs[jobs++], x, data, memory.back().data(), bytes);
      }
      data = memory.back().data();
      own_stride = along_k ? columns : 1;
      k_stride = along_k ? 1 : columns;
      if (several) batch_stride[0] = x.rows * columns;
    };
    copies.a_whole_lines = chosen.a;
    copies.b_whole_lines = chosen.b;
    if (chosen.a) {
      copy(c.a, copies.a, p.m, aligned.a_stride_m, aligned.a_stride_k, aligned.a_batch_stride);
    }
    if (chosen.b) {
      copy(c.b, copies.b, p.n, aligned.b_stride_n, aligned.b_stride_k, aligned.b_batch_stride);
    }
    const int64_t of_first = ceil_div(int64_t{params.jobs[0].total}, kPadBlockChunks);
    const int64_t of_second = ceil_div(int64_t{params.jobs[1].total}, kPadBlockChunks);
    params.first_blocks = static_cast<unsigned>(of_first);
    const Copier& copier = kernel_for(bytes);
    torch_cubin::launch(*copier.kernel, copier.spread.grid(of_first + of_second, device_), device_,
                        params);
    const MatmulPlan inner = plan_matmul(device_, matmul_case(aligned, copies));
    launch_plan(inner, aligned, copies, device_);
  }

 private:
  struct Copier {
    PackageKernel* kernel = nullptr;
    SpreadBlocks spread;
  };

  const Copier& kernel_for(int64_t element_bytes) const {
    return element_bytes == 2 ? of_2_bytes_ : element_bytes == 4 ? of_4_bytes_ : none_;
  }

  void rewrite(const MatmulCase& c, PadPlan chosen, MatmulConfigs& out) const {
    const int64_t bytes = element_size(c.input);
    MatmulCase aligned = c;
    double moved = 0, written = 0, taken = 0;  // bytes
    CopyCost cost = cost_;
    const auto copy = [&](bool broadcast, int64_t own, Access& access, bool& mappable,
                          bool& lines) {
      const bool along_k = is_along_k(access);
      access = along_k ? kKVectors : kOwnVectors;
      mappable = lines = true;
      if (c.symmetric && moved > 0) {  // the copy of A serves
        cost.fixed -= second_;
        return;
      }
      PaddedOperand x{};
      x.batch = broadcast ? 1 : c.batch;
      x.rows = along_k ? own : c.k;
      x.columns = along_k ? c.k : own;
      const double rows = static_cast<double>(x.batch) * static_cast<double>(x.rows);
      if (x.columns >= kMostColumns) taken = written = std::numeric_limits<double>::infinity();
      moved += rows * static_cast<double>(x.columns * bytes);
      written += rows * static_cast<double>(x.chunks(bytes) * kVectorBytes);
      taken += rows * static_cast<double>(x.row_chunks(bytes) * kVectorBytes);
    };
    if (chosen.a) copy(c.a_broadcast, c.m, aligned.a, aligned.a_mappable, aligned.a_lines);
    if (chosen.b) copy(c.b_broadcast, c.n, aligned.b, aligned.b_mappable, aligned.b_lines);
    const int64_t most = c.batch_invariant ? kMostChunkBytes : kMostPadBytes;
    if ((c.batch_invariant ? written : taken) > static_cast<double>(most)) return;
    MatmulPlan plan;
    plan.set(chosen);
    out.rewrite(plan, aligned, {moved + written}, cost);
  }

  static void fill_job(PadJob& job, const PaddedOperand& x, const char* from, char* to,
                       int64_t bytes) {
    const int64_t chunks = x.chunks(bytes);
    const int64_t last = (x.batch - 1) * x.batch_stride + (x.rows - 1) * x.row_stride + x.columns;
    job.from = from;
    job.to = to;
    job.row_stride = x.row_stride;
    job.batch_stride = x.batch_stride;
    job.to_row_stride = x.row_chunks(bytes);
    job.to_batch_stride = x.rows * x.row_chunks(bytes);
    job.low = reinterpret_cast<tc_int64>(from);
    job.high = job.low + last * bytes;
    job.chunks = static_cast<unsigned>(chunks);
    job.rows = static_cast<unsigned>(x.rows);
    job.columns = static_cast<unsigned>(x.columns);
    job.total = static_cast<unsigned>(x.batch * x.rows * chunks);
  }

  const Device& device_;
  Copier of_2_bytes_, of_4_bytes_;
  const Copier none_;
  CopyCost cost_;
  double second_ = 0;  // cycles of cost_.fixed, less if the second operand is the first one
};

const MatmulBackendOf<PadKernels, PadParams> g_pad("matmul/pad", {"pad"});

}  // namespace
}  // namespace torch_cubin
