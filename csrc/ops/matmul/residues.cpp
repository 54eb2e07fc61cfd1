// The backend of csrc/kernels/matmul/residues.cu: products on Hopper of operands whose rows begin
// anywhere, by the TMA and wgmma, without a copy.
#include <algorithm>
#include <string>
#include <vector>

#include "kernels/matmul/residues_params.h"
#include "ops/common/cluster_capacity.h"
#include "ops/common/launch.h"
#include "ops/matmul/backend.h"
#include "ops/matmul/sm90_map.h"

namespace torch_cubin {
namespace {

// Blocks of a cluster. More read one another's sums for longer than they save.
constexpr int64_t kResidueMostSplits = 2;
constexpr int64_t kResidueLineBytes = 128;              // of K, in a k block
constexpr int64_t kResidueMostSize = int64_t{1} << 30;  // the kernels' numbers are 32-bit
constexpr int64_t kLeastBlocksOfSplit = 2;              // k blocks

// One entry of the catalog.
struct ResidueRow {
  explicit ResidueRow(PackageKernel& kernel) : kernel(&kernel) {
    const KernelFields fields(kernel);
    constexpr const char* kMaths[] = {"float16", "bfloat16"};
    constexpr Math kMathOf[] = {kMathFloat16, kMathBFloat16};
    math = kMathOf[fields.index("math", kMaths)];
    int64_t tile[3];
    fields.triple("tile", 32, tile);
    tile_r = tile[0];
    tile_s = tile[1];
    tile_k = tile[2];
    const KernelFields cost = fields.object("cost");
    fixed = cost.number("fixed", 0);
    of_a = cost.number("of_a", 0);
    k_block = cost.number("k_block", 0);
    of_splits = cost.number("splits", 0);
    if (tile_r % 64 != 0 || tile_r / 8 > 256 || tile_s > 256) {
      fields.refuse("tile", "rows of whole warpgroups, in boxes of the TMA");
    }
  }

  PackageKernel* kernel;
  Math math;
  int64_t tile_r, tile_s, tile_k;
  // Cycles: of a block, and more where S is A or where K is divided; of each k block.
  double fixed, of_a, of_splits, k_block;
};

// What a launch needs besides the problem. s_is_b: the kernel's S is B, and C is D's transpose.
struct ResiduePlan {
  const ResidueRow* row;
  int64_t tiles_s, tiles_r, splits;
  bool s_is_b;
};

// An operand as the kernel reads it; strides in elements.
struct ResidueOperand {
  const char* data;
  int64_t size, stride, batch_stride;  // of its rows: M or N
};

class Residues : public MatmulKernels {
 public:
  Residues(const Device& device, const std::vector<PackageKernel*>& kernels) : device_(device) {
    for (PackageKernel* kernel : kernels) rows_.emplace_back(*kernel);
  }

  static void check(PackageKernel& kernel) { ResidueRow{kernel}; }

  void configs(const MatmulCase& c, MatmulConfigs& out) const override {
    if (!takes(c)) return;
    for (const bool s_is_b : {false, true}) {
      for (const ResidueRow& row : rows_) {
        if (row.math != c.math) continue;
        for (int64_t splits = 1; splits <= clusters_.largest(); splits *= 2) {
          offer(c, row, s_is_b, splits, out);
        }
      }
    }
  }

  bool has_capacity(const MatmulPlan& plan) const override {
    const int64_t splits = plan.get<ResiduePlan>().splits;
    return splits == 1 || splits <= clusters_.ask_largest(rows_, device_);
  }

  std::string name(const MatmulPlan& plan) const override {
    const auto chosen = plan.get<ResiduePlan>();
    return "residues " + std::to_string(chosen.row->tile_r) + "x" +
           std::to_string(chosen.row->tile_s) + (chosen.s_is_b ? " of b" : " of a") +
           (chosen.splits > 1 ? " " + std::to_string(chosen.splits) + " splits" : "");
  }

  void launch(const MatmulPlan& plan, const MatmulProblem& p,
              const MatmulOperands& operands) const override {
    const auto chosen = plan.get<ResiduePlan>();
    const ResidueRow& row = *chosen.row;
    const int64_t bytes = element_size(p.input);
    const bool batched = p.batch_dims > 0;
    ResidueOperand s = {operands.a, p.m, p.a_stride_m, batched ? p.a_batch_stride[0] : 0};
    ResidueOperand r = {operands.b, p.n, p.b_stride_n, batched ? p.b_batch_stride[0] : 0};
    if (chosen.s_is_b) std::swap(s, r);
    ResidueParams params{};
    const int64_t in_line = kResidueLineBytes / bytes, in_vector = kVectorBytes / bytes;
    const auto describe = [&](const ResidueOperand& x, int64_t tile, ResidueRows& rows) {
      const bool stacked = x.batch_stride != 0;
      rows.rows = static_cast<int>(stacked ? p.batch() * x.size : x.size);
      rows.batch_rows = stacked ? static_cast<int>(x.size) : 0;
      describe_rows(x.data, p.math, bytes, x.stride, p.k, {in_line, tile}, rows);
    };
    describe(s, row.tile_s, params.s);
    describe(r, row.tile_r / in_vector, params.r);
    params.rows_s = static_cast<int>(s.size);
    params.rows_r = static_cast<int>(r.size);
    params.batch = static_cast<int>(p.batch());
    params.out_batch_stride = p.m * p.n;
    params.out = operands.c;
    params.bias = operands.bias;
    params.bias_stride = operands.bias_stride;
    params.out_stride_s = chosen.s_is_b ? 1 : p.n;
    params.out_stride_r = chosen.s_is_b ? p.n : 1;
    params.k = static_cast<int>(p.k);
    params.tiles_s = static_cast<int>(chosen.tiles_s);
    params.tiles_r = static_cast<int>(chosen.tiles_r);
    params.splits = static_cast<int>(chosen.splits);
    const int64_t blocks = p.batch() * chosen.tiles_s * in_vector * chosen.tiles_r * chosen.splits;
    torch_cubin::launch(*row.kernel, {blocks, 1, 1, chosen.splits}, device_, params);
  }

 private:
  // Rows of A and of B along K. Operands that are all aligned have quicker kernels. Where K begins
  // in its blocks depends on the row, and so do the bits: not where they must be the same for any
  // M, nor where the result is symmetric.
  static bool takes(const MatmulCase& c) {
    return (c.math == kMathFloat16 || c.math == kMathBFloat16) && c.output == c.input &&
           c.only_bias() && !c.batch_invariant && !c.split_sums && !c.sums_rows() && !c.symmetric &&
           c.batch_dims <= 1 && is_along_k(c.a) && is_along_k(c.b) && c.a_unit && c.b_unit &&
           c.a_apart && c.b_apart && !(is_vectors(c.a) && is_vectors(c.b)) &&
           // Of fewer rows than residues some have none.
           std::min(c.m, c.n) >= kVectorBytes / element_size(c.input) &&
           std::max({c.batch * c.m, c.batch * c.n, c.k}) <= kResidueMostSize;
  }

  void offer(const MatmulCase& c, const ResidueRow& row, bool s_is_b, int64_t splits,
             MatmulConfigs& out) const {
    const int64_t in_vector = kVectorBytes / element_size(c.input);
    const int64_t of_s = s_is_b ? c.n : c.m, of_r = s_is_b ? c.m : c.n;
    ResiduePlan chosen;
    chosen.row = &row;
    chosen.tiles_s = ceil_div(ceil_div(of_s, in_vector), row.tile_s);
    chosen.tiles_r = ceil_div(of_r, row.tile_r);
    // S is read once. Of two tiles of R a copy is quicker (H200, NT: 180 x 2433 x 6369 38.7 us,
    // copied 35.0; 410 x 2812 x 7425 78, 57).
    if (chosen.tiles_r > 1) return;
    chosen.splits = splits;
    chosen.s_is_b = s_is_b;
    const int64_t k_blocks = ceil_div(c.k + in_vector - 1, row.tile_k);
    if (splits > 1 && k_blocks < kLeastBlocksOfSplit * splits) return;
    if (c.batch * chosen.tiles_s * in_vector > kMaxGrid[0] / (chosen.tiles_r * splits)) return;
    MatmulPlan plan;
    plan.set(chosen);
    out.offer(plan, work_of(c, chosen));
  }

  Work work_of(const MatmulCase& c, const ResiduePlan& plan) const {
    const ResidueRow& row = *plan.row;
    const int64_t bytes = element_size(c.input), in_vector = kVectorBytes / bytes;
    const int64_t blocks = c.batch * plan.tiles_s * in_vector * plan.tiles_r * plan.splits;
    const int64_t turns = ceil_div(blocks, device_.multiprocessors);
    const int64_t k_blocks =
        ceil_div(ceil_div(c.k + in_vector - 1, row.tile_k), plan.splits) * turns;
    const double each =
        row.fixed + (plan.s_is_b ? 0 : row.of_a) + (plan.splits > 1 ? row.of_splits : 0);
    Work work;
    work.threads = static_cast<double>(turns) * each + static_cast<double>(k_blocks) * row.k_block;
    work.handshakes = plan.splits > 1 ? 1 : 0;
    work.clusters = plan.splits > 1;
    work.filled =
        std::min(1.0, static_cast<double>(blocks) / static_cast<double>(device_.multiprocessors));
    const double m = static_cast<double>(c.m), n = static_cast<double>(c.n);
    const double k = static_cast<double>(c.k);
    work.bytes = static_cast<double>(c.batch * bytes) * (k * (m + n) + m * n);
    return work;
  }

  // A matrix of `length` elements in each row, as rows of whole vectors (residues_params.h).
  void describe_rows(const char* data, Math math, int64_t bytes, int64_t stride, int64_t length,
                     const int64_t (&box)[2], ResidueRows& out) const {
    const int64_t in_vector = kVectorBytes / bytes;
    const int64_t offset =
        static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % kVectorBytes) / bytes;
    const int64_t whole = out.rows / in_vector, rest = out.rows % in_vector;
    const auto encode = [&](int64_t residues, int64_t rows, Sm90TensorMap& map) {
      Sm90Matrix x{};
      x.data = data - offset * bytes;
      x.type = sm90_map_type(math);
      x.element_bytes = bytes;
      x.dims[0] = offset + (residues - 1) * stride + length;
      x.dims[1] = rows;
      x.stride = stride * in_vector;
      x.box[0] = box[0];
      x.box[1] = box[1];
      x.swizzle = MapSwizzle::k128Bytes;
      encode_sm90_map(x, device_, map);
    };
    encode(in_vector, whole, out.map[0]);
    if (rest > 0) encode(rest, whole + 1, out.map[1]);
    out.stride = static_cast<int>(stride);
    out.offset = static_cast<int>(offset);
  }

  const Device& device_;
  std::vector<ResidueRow> rows_;
  ClusterCapacity clusters_{kResidueMostSplits};
};

const MatmulBackendOf<Residues, ResidueParams> g_residues("matmul/residues", {"residues"});

}  // namespace
}  // namespace torch_cubin
