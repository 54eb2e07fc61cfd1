// The backend of csrc/kernels/matmul/unaligned.cu: small products on Hopper of operands whose rows
// begin anywhere, which it reads without a copy.
#include <algorithm>
#include <string>
#include <vector>

#include "ops/common/cluster_capacity.h"
#include "ops/common/launch.h"
#include "ops/matmul/backend.h"
#include "ops/matmul/params.h"

namespace torch_cubin {
namespace {

constexpr int64_t kUnalignedMostSplits = 8;  // blocks of a cluster, on every GPU
constexpr int64_t kUnalignedStretch = 128;   // bytes of K that are multiplied at a time
constexpr int64_t kUnalignedCopy = 256;      // bytes of a row, of k tiles that are not long
constexpr int64_t kUnalignedWarps = 8;
constexpr int64_t kMostBlocksOfSmallCluster = 4;          // later_in_large is of larger ones
constexpr int64_t kUnalignedMostSize = int64_t{1} << 30;  // the kernels' numbers are 32-bit

// Multiplications of the largest product: the fit knows none that is larger, and a copy pays there.
constexpr int64_t kUnalignedMostWork = int64_t{1} << 30;

// One entry of the catalog.
struct UnalignedRow {
  explicit UnalignedRow(PackageKernel& kernel) : kernel(&kernel) {
    const KernelFields fields(kernel);
    constexpr const char* kMaths[] = {"float16", "bfloat16", "tf32"};
    constexpr const char* kLayouts[] = {"nt", "nn"};
    constexpr Math kMathOf[] = {kMathFloat16, kMathBFloat16, kMathTF32};
    math = kMathOf[fields.index("math", kMaths)];
    b_along_k = fields.index("layout", kLayouts) == 0;
    int64_t tile[3];
    fields.triple("tile", 32, tile);
    tile_m = tile[0];
    tile_n = tile[1];
    tile_k = tile[2];
    slots = fields.integer("blocks_per_multiprocessor", 1);
    const KernelFields cost = fields.object("cost");
    in_order = fields.number("in_order", 0, 0) > 0;
    first_stretches = cost.number("first", 0, 1);
    later = cost.number("later", 0);
    later_in_large = cost.number("later_in_large", 0);
  }

  PackageKernel* kernel;
  Math math;
  bool b_along_k;
  int64_t tile_m, tile_n, tile_k;
  int64_t slots;                 // blocks of a multiprocessor
  bool in_order;                 // each warp adds all of K: for batch_invariant() alone
  double first_stretches;        // what stretches of the first k tile take, of those of other rows
  double later, later_in_large;  // what stretches of later k tiles take, of those of the first
};

// What a launch needs besides the problem.
struct UnalignedPlan {
  const UnalignedRow* row;
  int64_t tiles_m, tiles_n, k_tiles_per_split, splits;
};

class Unaligned : public MatmulKernels {
 public:
  Unaligned(const Device& device, const std::vector<PackageKernel*>& kernels) : device_(device) {
    for (PackageKernel* kernel : kernels) rows_.emplace_back(*kernel);
  }

  static void check(PackageKernel& kernel) { UnalignedRow{kernel}; }

  void configs(const MatmulCase& c, MatmulConfigs& out) const override {
    if (!takes(c)) return;
    for (const UnalignedRow& row : rows_) {
      if (row.math != c.math || row.b_along_k != is_along_k(c.b)) continue;
      if (row.in_order != c.batch_invariant) continue;
      const int64_t most = row.in_order ? 1 : clusters_.largest();
      for (int64_t splits = 1; splits <= most; ++splits) offer(c, row, splits, out);
    }
  }

  bool has_capacity(const MatmulPlan& plan) const override {
    const int64_t splits = plan.get<UnalignedPlan>().splits;
    return splits == 1 || splits <= clusters_.ask_largest(rows_, device_);
  }

  std::string name(const MatmulPlan& plan) const override {
    const auto chosen = plan.get<UnalignedPlan>();
    return "unaligned " + std::to_string(chosen.row->tile_m) + "x" +
           std::to_string(chosen.row->tile_n) + (chosen.row->in_order ? " in order" : "") +
           (chosen.splits > 1 ? " " + std::to_string(chosen.splits) + " splits" : "");
  }

  void launch(const MatmulPlan& plan, const MatmulProblem& p,
              const MatmulOperands& operands) const override {
    const auto chosen = plan.get<UnalignedPlan>();
    MatmulParams params = matmul_params(p, operands);
    params.tiles_m = chosen.tiles_m;
    params.tiles_n = chosen.tiles_n;
    params.k_tiles_per_split = chosen.k_tiles_per_split;
    params.splits = static_cast<int>(chosen.splits);
    const int64_t blocks = chosen.tiles_m * chosen.tiles_n * p.batch() * chosen.splits;
    torch_cubin::launch(*chosen.row->kernel, {blocks, 1, 1, chosen.splits}, device_, params);
  }

 private:
  // Rows of A along K, rows of B along either dim. Operands that are all aligned have quicker
  // kernels.
  static bool takes(const MatmulCase& c) {
    return c.output == c.input && c.only_bias() && !c.split_sums && !c.sums_rows() &&
           is_along_k(c.a) && c.a_unit && c.b_unit && !(is_vectors(c.a) && is_vectors(c.b));
  }

  void offer(const MatmulCase& c, const UnalignedRow& row, int64_t splits,
             MatmulConfigs& out) const {
    UnalignedPlan chosen;
    chosen.row = &row;
    chosen.tiles_m = ceil_div(c.m, row.tile_m);
    chosen.tiles_n = ceil_div(c.n, row.tile_n);
    const int64_t k_tiles = ceil_div(c.k, row.tile_k);
    chosen.k_tiles_per_split = ceil_div(k_tiles, splits);
    chosen.splits = splits;
    const double work = static_cast<double>(c.batch) * static_cast<double>(c.m) *
                        static_cast<double>(c.n) * static_cast<double>(c.k);
    if (std::max({c.m, c.n, c.k}) > kUnalignedMostSize || work > kUnalignedMostWork) return;
    if (ceil_div(k_tiles, chosen.k_tiles_per_split) != splits) return;  // none is empty
    if (chosen.tiles_m * chosen.tiles_n > kMaxGrid[0] / (c.batch * splits)) return;
    MatmulPlan plan;
    plan.set(chosen);
    out.offer(plan, work_of(c, chosen));
  }

  Work work_of(const MatmulCase& c, const UnalignedPlan& plan) const {
    const UnalignedRow& row = *plan.row;
    const int64_t blocks = plan.tiles_m * plan.tiles_n * c.batch * plan.splits;
    const int64_t bytes = element_size(c.input), stretch = kUnalignedStretch / bytes;
    const int64_t k = std::min(c.k, plan.k_tiles_per_split * row.tile_k);  // of a block
    // Up to `slots` blocks share a multiprocessor, then come the next ones.
    // Large clusters leave some multiprocessors without a block.
    const int64_t multiprocessors =
        plan.splits > 2 ? clusters_at_once(device_.multiprocessors, plan.splits) * plan.splits
                        : device_.multiprocessors;
    const int64_t at_once = multiprocessors * row.slots;
    Work work;
    // A block multiplies 64 rows in half the time of 128, and takes as long again for each stretch
    // of the first 256 bytes of K. The next ones take less of TF32, whose words are not shifted,
    // and of 16 bits by k tiles of 256 bytes longer in large clusters (H200: 62 x 2164 1.76 us
    // each).
    const double factor = plan.splits > kMostBlocksOfSmallCluster ? row.later_in_large : row.later;
    const int64_t all = ceil_div(k, stretch),
                  first = std::min(all, kUnalignedCopy / kUnalignedStretch);
    const double later = factor * static_cast<double>(all - first);
    work.stretches = (row.first_stretches * static_cast<double>(first) + later) *
                     static_cast<double>(64 + row.tile_m) / 128;
    // Copies of a row: of 256 bytes, or of longer ones what these take. Where one tile has all
    // columns of x @ x.t(), A's rows are among them, and are copied once.
    const double copies = row.tile_k * bytes == kUnalignedCopy
                              ? static_cast<double>(plan.k_tiles_per_split)
                              : 1 + later * kUnalignedStretch / kUnalignedCopy;
    const int64_t rows_of_a = c.own_transpose && c.n <= row.tile_n ? 0 : std::min(c.m, row.tile_m);
    const auto rows_of_b = static_cast<double>(std::min(c.n, row.tile_n));
    work.rows = (copies * static_cast<double>(rows_of_a) +
                 (row.b_along_k ? copies * rows_of_b : static_cast<double>(k))) /
                kUnalignedWarps;
    // Where few multiprocessors have one block more than others, these end sooner, and the memory
    // serves the rest (H200, x @ x.t() of 739 x 71: 144 blocks on 132 take 4.8 to 5.0 us).
    const double of_one = static_cast<double>(blocks) / static_cast<double>(multiprocessors);
    const auto most = static_cast<double>(ceil_div(blocks, multiprocessors));
    work.blocks = blocks > at_once ? static_cast<double>(ceil_div(blocks, at_once) * row.slots)
                                   : (std::max(1.0, of_one) + 2 * most) / 3;
    // A multiprocessor's only block of one k tile loads all of K at once, along K (H200, 16
    // products of up to 106 elements of K: 0.6 us less than predicted; 96 x 94 x 163 2.6 us).
    const bool along_k = row.b_along_k && !is_vectors(c.a) && !is_vectors(c.b) && plan.splits == 1;
    work.tiles = along_k && k <= row.tile_k && work.blocks == 1 ? 0 : work.blocks;
    work.store_bytes =
        static_cast<double>(std::min(c.m, row.tile_m) * std::min(c.n, row.tile_n) * bytes);
    work.handshakes = plan.splits > 1 ? 1 : 0;
    // Each block of a cluster reads the others' sums of its rows.
    work.clusters = plan.splits > 1;
    work.sums_bytes = static_cast<double>(row.tile_m * row.tile_n * 4 * (plan.splits - 1)) /
                      static_cast<double>(plan.splits);
    const double m = static_cast<double>(c.m), n = static_cast<double>(c.n);
    work.bytes =
        static_cast<double>(bytes * c.batch) * (static_cast<double>(c.k) * (m + n) + m * n);
    return work;
  }

  const Device& device_;
  std::vector<UnalignedRow> rows_;
  ClusterCapacity clusters_{kUnalignedMostSplits};
};

const MatmulBackendOf<Unaligned, MatmulParams> g_unaligned("matmul", {"unaligned"});

}  // namespace
}  // namespace torch_cubin
