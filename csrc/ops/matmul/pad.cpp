// The seam of csrc/kernels/matmul/pad.cu: an operand whose rows no kernel can read 16 bytes at a time is
// copied to rows of whole 16-byte chunks first, and the product then goes to whichever kernels are
// quickest for aligned operands. The copy runs at the memory's speed; kernels that read by elements run
// at a fraction of the aligned ones'.
#include <algorithm>
#include <vector>

#include "kernels/matmul/pad_params.h"
#include "ops/common/launch.h"
#include "ops/matmul/plan.h"
#include "ops/matmul/seam.h"

namespace torch_cubin {
namespace {

constexpr int64_t kPadBlockChunks = 1024;  // of a kernel's block
// Bytes of copies that a product may take beside its operands and its output; so are their chunks
// few enough for the kernel's 32-bit counts.
constexpr double kMostPadBytes = 2.0 * (1 << 30);

// Multiplications below which a second launch costs more than slow reads.
constexpr double kLeastPaddedWork = 256.0 * 256 * 256;

// An operand as rows along its unit dim.
struct PaddedOperand {
  int64_t batch, rows, columns;
  int64_t row_stride, batch_stride;  // elements of the operand

  int64_t padded_columns(int64_t element_bytes) const {
    return ceil_div(columns * element_bytes, kVectorBytes) * kVectorBytes / element_bytes;
  }
  int64_t bytes(int64_t element_bytes) const {
    return batch * rows * padded_columns(element_bytes) * element_bytes;
  }
};

bool needs_copy(Access access) { return !is_vectors(access); }

class PadKernels : public MatmulKernels {
 public:
  PadKernels(const Device& device, const std::vector<PackageKernel*>& kernels) : device_(device) {
    for (PackageKernel* kernel : kernels) {
      const KernelFields fields(*kernel);
      const int64_t bytes = fields.integer("alignment", 2, 4);
      (bytes == 2 ? of_2_bytes_ : of_4_bytes_) = kernel;
      share_ = fields.object("cost").number("share", 0.1);
      fixed_ = fields.object("cost").number("fixed", 0);
    }
  }

  MatmulPlan plan(const MatmulCase& c) const override {
    MatmulPlan plan;
    const int64_t bytes = element_size(c.input);
    const bool a = needs_copy(c.a), b = needs_copy(c.b);
    if ((!a && !b) || (a && !c.a_unit) || (b && !c.b_unit) || kernel_for(bytes) == nullptr ||
        c.batch_dims > 1) {
      return plan;
    }
    const double work = static_cast<double>(c.batch) * c.m * c.n * c.k;
    if (work < kLeastPaddedWork) return plan;
    MatmulCase aligned = c;
    double read = 0, written = 0;
    if (a)
      pad_case(c.a_broadcast ? 1 : c.batch, c.m, c.k, bytes, aligned.a, aligned.a_mappable, read,
               written);
    if (b)
      pad_case(c.b_broadcast ? 1 : c.batch, c.n, c.k, bytes, aligned.b, aligned.b_mappable, read,
               written);
    if (written > kMostPadBytes) return plan;
    const MatmulPlan& inner = plan_matmul(device_, aligned);
    if (inner.kernels == nullptr) return plan;
    const double cycles = (read + written) / (device_.bytes_per_cycle * share_) + fixed_;
    plan.microseconds = inner.microseconds + cycles / device_.cycles_per_microsecond;
    return plan;
  }

  // What follows the copy is chosen by itself.
  std::string name(const MatmulPlan&) const override { return "pad"; }

  void launch(const MatmulPlan&, const MatmulProblem& p,
              const MatmulOperands& operands) const override {
    const MatmulCase c = matmul_case(p, operands);
    const int64_t bytes = element_size(p.input);
    MatmulProblem aligned = p;
    MatmulOperands copies = operands;
    PadParams params{};
    std::vector<Workspace> memory;
    int jobs = 0;
    const auto copy = [&](Access access, const char*& data, int64_t own, int64_t& own_stride,
                          int64_t& k_stride, int64_t* batch_stride) {
      const bool along_k = access == kKElements;
      const bool several = p.batch_dims == 1 && batch_stride[0] != 0;
      PaddedOperand x;
      x.batch = several ? p.batch_size[0] : 1;
      x.rows = along_k ? own : p.k;
      x.columns = along_k ? p.k : own;
      x.row_stride = along_k ? own_stride : k_stride;
      x.batch_stride = several ? batch_stride[0] : 0;
      memory.emplace_back(device_, x.bytes(bytes));
      const int64_t columns = x.padded_columns(bytes);
      fill_job(params.jobs[jobs++], x, data, memory.back().data(), bytes);
      data = memory.back().data();
      own_stride = along_k ? columns : 1;
      k_stride = along_k ? 1 : columns;
      if (several) batch_stride[0] = x.rows * columns;
    };
    if (needs_copy(c.a)) {
      copy(c.a, copies.a, p.m, aligned.a_stride_m, aligned.a_stride_k, aligned.a_batch_stride);
    }
    if (needs_copy(c.b)) {
      copy(c.b, copies.b, p.n, aligned.b_stride_n, aligned.b_stride_k, aligned.b_batch_stride);
    }
    const int64_t first = ceil_div(int64_t{params.jobs[0].total}, kPadBlockChunks);
    const int64_t second = ceil_div(int64_t{params.jobs[1].total}, kPadBlockChunks);
    params.first_blocks = static_cast<unsigned>(first);
    torch_cubin::launch(*kernel_for(bytes), {first + second}, device_, params);
    const MatmulPlan inner = plan_matmul(device_, matmul_case(aligned, copies));
    inner.kernels->launch(inner, aligned, copies);
  }

 private:
  PackageKernel* kernel_for(int64_t element_bytes) const {
    return element_bytes == 2 ? of_2_bytes_ : element_bytes == 4 ? of_4_bytes_ : nullptr;
  }

  // What a copy makes of an operand; adds the bytes that it reads and writes.
  static void pad_case(int64_t batch, int64_t own, int64_t k, int64_t bytes, Access& access,
                       bool& mappable, double& read, double& written) {
    const bool along_k = access == kKElements;
    const double rows = static_cast<double>(batch) * static_cast<double>(along_k ? own : k);
    const int64_t columns = along_k ? k : own;
    read += rows * static_cast<double>(columns * bytes);
    written += rows * static_cast<double>(ceil_div(columns * bytes, kVectorBytes) * kVectorBytes);
    access = along_k ? kKVectors : kOwnVectors;
    mappable = true;
  }

  static void fill_job(PadJob& job, const PaddedOperand& x, const char* from, char* to,
                       int64_t bytes) {
    const int64_t chunks = x.padded_columns(bytes) * bytes / kVectorBytes;
    const int64_t last = (x.batch - 1) * x.batch_stride + (x.rows - 1) * x.row_stride + x.columns;
    job.from = from;
    job.to = to;
    job.row_stride = x.row_stride;
    job.batch_stride = x.batch_stride;
    job.to_row_stride = chunks;
    job.to_batch_stride = x.rows * chunks;
    job.low = reinterpret_cast<tc_int64>(from);
    job.high = job.low + last * bytes;
    job.chunks = static_cast<unsigned>(chunks);
    job.rows = static_cast<unsigned>(x.rows);
    job.columns = static_cast<unsigned>(x.columns);
    job.total = static_cast<unsigned>(x.batch * x.rows * chunks);
  }

  const Device& device_;
  PackageKernel* of_2_bytes_ = nullptr;
  PackageKernel* of_4_bytes_ = nullptr;
  double share_ = 0.85;  // of the memory's peak
  double fixed_ = 0;     // cycles of a launch
};

class PadSeam : public MatmulSeam {
 public:
  bool owns(const KernelEntry& entry) const override { return entry.kind == "pad"; }

  void check(const PackageKernel& kernel) const override {
    check_params(kernel.entry(), "matmul/pad", sizeof(PadParams));
    const KernelFields fields(kernel);
    fields.integer("alignment", 2, 4);
    fields.object("cost").number("share", 0.1);
    fields.object("cost").number("fixed", 0);
  }

  std::unique_ptr<MatmulKernels> on(const Device& device,
                                    const std::vector<PackageKernel*>& kernels) const override {
    return std::make_unique<PadKernels>(device, kernels);
  }
};

const PadSeam g_pad;

}  // namespace
}  // namespace torch_cubin
