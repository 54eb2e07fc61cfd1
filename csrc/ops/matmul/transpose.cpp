// The backend of csrc/kernels/matmul/transpose.cu: TF32 products of operands that are not
// contiguous along K, which wgmma cannot read from shared memory. They, or one of two, are copied
// first so that they are, and the product then goes to whichever kernels are quickest for that:
// those of sm90.cu take one such operand, where its rows are aligned. And float32 products of
// operands that are, which simt.cu's threads have to transpose themselves, with instructions that
// are no FMA: of large ones copies take less (4096 x 4096 x 4096, NT: 1.3% of the time each).
#include <algorithm>
#include <string>
#include <vector>

#include "kernels/matmul/transpose_params.h"
#include "ops/common/launch.h"
#include "ops/common/spread_blocks.h"
#include "ops/matmul/backend.h"
#include "ops/matmul/plan.h"

namespace torch_cubin {
namespace {

constexpr int64_t kTransposeTile = 64;
constexpr int64_t kFloatBytes = 4;
// Bytes of copies that a product may take beside its operands and its output.
constexpr int64_t kMostTransposedBytes = int64_t{2} << 30;
// Multiplications below which a second launch costs more than the portable kernels' slower
// products: of TF32, and of float32.
constexpr int64_t kLeastTransposedWork = int64_t{1} << 23;
constexpr int64_t kLeastFloat32Work = int64_t{1} << 32;
constexpr int64_t kLeastInvariantOutputs = int64_t{1} << 22;  // of float32, batch_invariant()

// From one row of a copy, of `size` elements, to the next: rows begin at lines of the cache.
int64_t transposed_pitch(int64_t size) {
  return ceil_div(size * kFloatBytes, kLineBytes) * kLineBytes / kFloatBytes;
}

// Whether copies are contiguous along K, or, as those of float32, along the operand's own dim.
bool to_k(Math math) { return math == kMathTF32; }

// Which operands a plan copies.
struct TransposePlan {
  bool a, b;
};

class TransposeKernels : public MatmulKernels {
 public:
  TransposeKernels(const Device& device, const std::vector<PackageKernel*>& kernels)
      : device_(device),
        kernel_(*kernels.front()),
        spread_(KernelFields(kernel_)),
        cost_(KernelFields(kernel_)),
        elements_(KernelFields(kernel_).object("cost").number("elements", 0)) {}

  static void check(PackageKernel& kernel) {
    const KernelFields fields(kernel);
    int64_t tile[3];
    fields.triple("tile", 1, tile);
    if (tile[0] != kTransposeTile || tile[1] != kTransposeTile) {
      fields.refuse("tile", "64 rows and columns");
    }
    CopyCost{fields};  // throws for a figure that is wrong
    SpreadBlocks{fields};
  }

  void configs(const MatmulCase& c, MatmulConfigs& out) const override {
    const bool a = is_along_k(c.a) != to_k(c.math), b = is_along_k(c.b) != to_k(c.math);
    // Of a matrix by its transpose both are the same copy. (With one of them as it is, rounded
    // elsewhere, C was not symmetric in bits.)
    if (a && !(b && c.symmetric)) rewrite(c, {true, false}, out);
    if (b && !(a && c.symmetric)) rewrite(c, {false, true}, out);
    if (a && b) rewrite(c, {true, true}, out);
  }

  // What follows the copy is chosen by itself.
  std::string name(const MatmulPlan& plan) const override {
    const auto chosen = plan.get<TransposePlan>();
    return std::string("transpose ") + (chosen.a ? "a" : "") + (chosen.b ? "b" : "");
  }

  void launch(const MatmulPlan& plan, const MatmulProblem& p,
              const MatmulOperands& operands) const override {
    const auto chosen = plan.get<TransposePlan>();
    MatmulProblem turned = p;
    MatmulOperands copies = operands;
    TransposeParams params{};
    params.rounds = to_k(p.math);
    std::vector<Workspace> memory;
    int64_t blocks = 0;
    int jobs = 0;
    const auto copy = [&](const char*& data, int64_t own, int64_t& own_stride, int64_t& k_stride,
                          int64_t* batch_stride) {
      const bool several = p.batch_dims == 1 && batch_stride[0] != 0;
      const int64_t batch = several ? p.batch_size[0] : 1;
      const int64_t rows = to_k(p.math) ? p.k : own, columns = to_k(p.math) ? own : p.k;
      int64_t& row_stride = to_k(p.math) ? k_stride : own_stride;
      const int64_t pitch = transposed_pitch(rows), bytes = columns * pitch * kFloatBytes;
      const auto use_copy = [&] {
        data = memory.back().data();
        own_stride = to_k(p.math) ? pitch : 1;
        k_stride = to_k(p.math) ? 1 : pitch;
        if (several) batch_stride[0] = columns * pitch;
      };
      // A matrix times its transpose is copied once.
      if (jobs == 1 && p.symmetry != Symmetry::kNone) return use_copy();
      memory.emplace_back(device_, batch * bytes);
      TransposeJob& job = params.jobs[jobs++];
      job.from = data;
      job.to = memory.back().data();
      job.row_stride = row_stride;
      job.batch_stride = several ? batch_stride[0] : 0;
      job.to_row_stride = pitch;
      job.to_batch_stride = columns * pitch;
      job.rows = static_cast<int>(rows);
      job.columns = static_cast<int>(columns);
      job.tiles_rows = static_cast<int>(ceil_div(rows, kTransposeTile));
      job.tiles_columns = static_cast<int>(ceil_div(columns, kTransposeTile));
      constexpr int64_t kVector = kVectorBytes / kFloatBytes;
      job.vectors = reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0 &&
                    row_stride % kVector == 0 && job.batch_stride % kVector == 0;
      blocks += batch * job.tiles_rows * job.tiles_columns;
      if (jobs == 1) params.first_blocks = static_cast<unsigned>(blocks);
      use_copy();
    };
    if (chosen.a) {
      copy(copies.a, p.m, turned.a_stride_m, turned.a_stride_k, turned.a_batch_stride);
    }
    if (chosen.b) {
      copy(copies.b, p.n, turned.b_stride_n, turned.b_stride_k, turned.b_batch_stride);
    }
    torch_cubin::launch(kernel_, spread_.grid(blocks, device_), device_, params);
    const MatmulPlan inner = plan_matmul(device_, matmul_case(turned, copies));
    launch_plan(inner, turned, copies, device_);
  }

 private:
  void rewrite(const MatmulCase& c, TransposePlan chosen, MatmulConfigs& out) const {
    const double work = static_cast<double>(c.batch) * c.m * c.n * c.k;
    const bool is_tf32 = c.math == kMathTF32;
    if (!is_tf32 && c.math != kMathFloat32) return;
    if (c.split_sums || c.sums_rows() || c.batch_dims > 1) return;
    // Which kernels follow could depend on the number of rows: those of float32 add in one order.
    // Those of fewer outputs gain nothing by it (H200: 640 x 2560 x 3072, NN, 348 us, directly
    // 298).
    const double outputs = static_cast<double>(c.batch) * c.m * c.n;
    if (c.batch_invariant && (is_tf32 || outputs < kLeastInvariantOutputs)) return;
    if (work < (is_tf32 ? kLeastTransposedWork : kLeastFloat32Work)) return;
    if ((chosen.a && !c.a_unit) || (chosen.b && !c.b_unit)) return;
    constexpr int64_t kMostSize = (int64_t{1} << 31) - kTransposeTile;
    if (c.m > kMostSize || c.n > kMostSize || c.k > kMostSize) return;
    MatmulCase turned = c;
    double copied = 0;  // bytes
    const auto turn = [&](bool broadcast, int64_t own, Access& access, bool& mappable,
                          bool& lines) {
      access = to_k(c.math) ? kKVectors : kOwnVectors;
      mappable = lines = true;
      if (c.symmetric && copied > 0) return;  // the copy of A serves
      const int64_t row = transposed_pitch(to_k(c.math) ? c.k : own);
      copied += static_cast<double>(broadcast ? 1 : c.batch) * kFloatBytes *
                static_cast<double>((to_k(c.math) ? own : c.k) * row);
    };
    if (chosen.a) turn(c.a_broadcast, c.m, turned.a, turned.a_mappable, turned.a_lines);
    if (chosen.b) turn(c.b_broadcast, c.n, turned.b, turned.b_mappable, turned.b_lines);
    if (copied > kMostTransposedBytes) return;
    MatmulPlan plan;
    plan.set(chosen);
    CopyCost cost = cost_;
    if ((chosen.a && !is_vectors(c.a)) || (chosen.b && !is_vectors(c.b))) cost.fixed += elements_;
    out.rewrite(plan, turned, {2 * copied}, cost);
  }

  const Device& device_;
  PackageKernel& kernel_;
  const SpreadBlocks spread_;
  const CopyCost cost_;
  const double elements_;  // cycles more where operands are read one element at a time
};

const MatmulBackendOf<TransposeKernels, TransposeParams> g_transpose("matmul/transpose",
                                                                     {"transpose"});

}  // namespace
}  // namespace torch_cubin
