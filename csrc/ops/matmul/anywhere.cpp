// The backend of csrc/kernels/matmul/anywhere.cu: products on Hopper of operands whose rows begin
// anywhere, which it reads without a copy. K is divided over the blocks of a cluster, or over more
// blocks, whose sums reduce.cu adds.
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "ops/common/cluster_capacity.h"
#include "ops/common/launch.h"
#include "ops/matmul/backend.h"
#include "ops/matmul/params.h"
#include "ops/matmul/portable_table.h"

namespace torch_cubin {
namespace {

constexpr int64_t kAnywhereMostSplits = 8;               // blocks of a cluster, on every GPU
constexpr int64_t kAnywhereMostSize = int64_t{1} << 30;  // the kernels' numbers are 32-bit
constexpr int64_t kWholeTile = 64;  // rows and columns that both warpgroups multiply
constexpr int64_t kSumBytes = 4;
constexpr int64_t kShortParts = 2;    // of K, 128 bytes each, that a kernel for a short K takes
constexpr int64_t kReduceWaves = 16;  // blocks of reduce.cu on a multiprocessor

// One entry of the catalog.
struct AnywhereRow {
  explicit AnywhereRow(PackageKernel& kernel) : kernel(&kernel) {
    const KernelFields fields(kernel);
    constexpr const char* kMaths[] = {"float16", "bfloat16", "tf32"};
    constexpr Math kMathOf[] = {kMathFloat16, kMathBFloat16, kMathTF32};
    math = kMathOf[fields.index("math", kMaths)];
    int64_t tile[3];
    fields.triple("tile", 32, tile);
    tile_m = tile[0];
    tile_n = tile[1];
    part_k = tile[2];
    is_short = fields.integer("short", 0, 1) != 0;
    slots = fields.integer("blocks_per_multiprocessor", 1);
    const KernelFields cost = fields.object("cost");
    of_block = cost.number("block", 0);
    of_part = cost.number("part", 0);
    beside = cost.number("beside", 0);
    again = cost.number("again", 0);
    turned = cost.number("turned", 0);
    of_split = cost.number("split", 0);
    of_memory = cost.number("memory", 0);
  }

  // Two warpgroups have half of each part of K, so that no chain has all of it. Their sums lie in
  // shared memory in the end.
  bool halves_k() const { return tile_m == kWholeTile && tile_n == kWholeTile; }

  PackageKernel* kernel;
  Math math;
  int64_t tile_m, tile_n, part_k;
  bool is_short;
  int64_t slots;             // blocks of a multiprocessor
  double of_block, of_part;  // cycles: of a block, and of each part of K of all rows of its tile
  double beside;     // share of its time that each other block that shares the multiprocessor takes
  double again;      // how often the memory reads what blocks read of one another's operands
  double turned;     // share of a part's time more for each operand that is not contiguous along K
  double of_split;   // cycles more of a block whose sums its cluster adds
  double of_memory;  // of the two kernels where another one adds them
};

// What a launch needs besides the problem.
struct AnywherePlan {
  const AnywhereRow* row;
  int64_t tiles_m, tiles_n, parts_per_split, splits;
  bool in_memory;  // the splits' sums: reduce.cu adds them
  bool a_along_k, b_along_k;
};

class Anywhere : public MatmulKernels {
 public:
  Anywhere(const Device& device, const std::vector<PackageKernel*>& kernels) : device_(device) {
    for (PackageKernel* kernel : kernels) {
      if (kernel->entry().kind != kReduce) {
        rows_.emplace_back(*kernel);
        continue;
      }
      const PortableRow row(*kernel, device);
      reduce_[row.math == kMathFloat32 ? kMathTF32 : row.math].emplace(row);
    }
  }

  static void check(PackageKernel& kernel) {
    if (kernel.entry().kind == kReduce) {
      PortableRow(kernel, Device());
    } else {
      AnywhereRow{kernel};
    }
  }

  void configs(const MatmulCase& c, MatmulConfigs& out) const override {
    if (!takes(c)) return;
    for (const AnywhereRow& row : rows_) {
      if (row.math != c.math) continue;
      const int64_t parts = ceil_div(c.k, row.part_k);
      if (row.is_short && parts > kShortParts) continue;
      if (c.batch_invariant && row.halves_k()) continue;
      const int64_t most = row.is_short || c.batch_invariant ? 1 : clusters_.largest();
      for (int64_t splits = 1; splits <= most; ++splits) {
        const int64_t of_one = ceil_div(parts, splits);
        if (ceil_div(parts, of_one) == splits) offer(c, row, splits, false, out);  // none is empty
      }
      if (row.halves_k() && reduce_[c.math]) offer_in_memory(c, row, parts, out);
    }
  }

  bool has_capacity(const MatmulPlan& plan) const override {
    const int64_t splits = plan.get<AnywherePlan>().splits;
    return splits == 1 || plan.get<AnywherePlan>().in_memory ||
           splits <= clusters_.ask_largest(rows_, device_);
  }

  std::string name(const MatmulPlan& plan) const override {
    const auto chosen = plan.get<AnywherePlan>();
    return "anywhere " + std::to_string(chosen.row->tile_m) + "x" +
           std::to_string(chosen.row->tile_n) + (chosen.row->is_short ? " short" : "") +
           (chosen.splits > 1 ? " " + std::to_string(chosen.splits) + " splits" : "") +
           (chosen.in_memory ? " in memory" : "");
  }

  void launch(const MatmulPlan& plan, const MatmulProblem& p,
              const MatmulOperands& operands) const override {
    const auto chosen = plan.get<AnywherePlan>();
    MatmulParams params = matmul_params(p, operands);
    // The kernel sees by the strides which dim is contiguous: those of a dim of one are any number.
    (chosen.a_along_k ? params.a_stride_k : params.a_stride_m) = 1;
    (chosen.b_along_k ? params.b_stride_k : params.b_stride_n) = 1;
    params.tiles_m = chosen.tiles_m;
    params.tiles_n = chosen.tiles_n;
    params.k_tiles_per_split = chosen.parts_per_split;
    params.splits = static_cast<int>(chosen.splits);
    const int64_t outputs = p.batch() * p.m * p.n;
    const Workspace sums(device_, chosen.in_memory ? outputs * chosen.splits * kSumBytes : 0);
    if (chosen.in_memory) params.partial = sums.data();
    torch_cubin::launch(*chosen.row->kernel,
                        {chosen.tiles_n * chosen.splits, chosen.tiles_m, p.batch(),
                         chosen.in_memory ? 1 : chosen.splits},
                        device_, params);
    if (!chosen.in_memory) return;
    // Any number of blocks is right: they share the outputs out among themselves.
    const PortableRow& reduce = *reduce_[p.math];
    const int64_t blocks =
        std::min(ceil_div(outputs, reduce.tile_n), kReduceWaves * device_.multiprocessors);
    torch_cubin::launch(*reduce.kernel, {blocks}, device_, params);
  }

 private:
  // Operands of any strides, if neighbours along one dim lie side by side. Where both are aligned,
  // only TF32 ones that do not both lie along K: the others have quicker kernels at every size, and
  // these none for few tiles (H200, x.t() @ x of 2 of 192 x 216: 4.6 us by four blocks a tile).
  static bool takes(const MatmulCase& c) {
    return c.output == c.input && c.only_bias() && !c.split_sums && !c.sums_rows() && c.a_unit &&
           c.b_unit && !(c.batch_invariant && c.math == kMathTF32) &&
           !(is_vectors(c.a) && is_vectors(c.b) &&
             (c.math != kMathTF32 || (is_along_k(c.a) && is_along_k(c.b)))) &&
           std::max({c.m, c.n, c.k}) <= kAnywhereMostSize;
  }

  // More blocks than a cluster has, as long as all of them run at a time.
  void offer_in_memory(const MatmulCase& c, const AnywhereRow& row, int64_t parts,
                       MatmulConfigs& out) const {
    const int64_t tiles = ceil_div(c.m, row.tile_m) * ceil_div(c.n, row.tile_n) * c.batch;
    int64_t last = 0;
    for (int64_t of_one = 1; of_one <= parts; ++of_one) {
      const int64_t splits = ceil_div(parts, of_one);
      if (splits <= kAnywhereMostSplits) break;
      if (splits == last || splits * tiles > device_.multiprocessors * row.slots) continue;
      last = splits;
      offer(c, row, splits, true, out);
    }
  }

  void offer(const MatmulCase& c, const AnywhereRow& row, int64_t splits, bool in_memory,
             MatmulConfigs& out) const {
    AnywherePlan chosen;
    chosen.row = &row;
    chosen.tiles_m = ceil_div(c.m, row.tile_m);
    chosen.tiles_n = ceil_div(c.n, row.tile_n);
    chosen.parts_per_split = ceil_div(ceil_div(c.k, row.part_k), splits);
    chosen.splits = splits;
    chosen.in_memory = in_memory;
    chosen.a_along_k = is_along_k(c.a);
    chosen.b_along_k = is_along_k(c.b);
    if (chosen.tiles_m > kMaxGrid[1] || c.batch > kMaxGrid[2]) return;
    MatmulPlan plan;
    plan.set(chosen);
    out.offer(plan, work_of(c, chosen));
  }

  Work work_of(const MatmulCase& c, const AnywherePlan& plan) const {
    const AnywhereRow& row = *plan.row;
    const int64_t blocks = plan.tiles_m * plan.tiles_n * c.batch * plan.splits;
    // Large clusters leave some multiprocessors without a block.
    const int64_t multiprocessors =
        plan.splits > 2 && !plan.in_memory
            ? clusters_at_once(device_.multiprocessors, plan.splits) * plan.splits
            : device_.multiprocessors;
    const double of_one = static_cast<double>(blocks) / static_cast<double>(multiprocessors);
    const auto tiles_m = static_cast<double>(plan.tiles_m);
    const auto tiles_n = static_cast<double>(plan.tiles_n);
    const double batch = static_cast<double>(c.batch), m = static_cast<double>(c.m),
                 n = static_cast<double>(c.n), k = static_cast<double>(c.k);
    // Half of a part's time is that of its rows, which the only tile of x @ x.t() reads once.
    const bool once = c.own_transpose && row.tile_m == row.tile_n && tiles_m == 1;
    const double rows =
        (m / tiles_m + (once ? 0 : n / tiles_n)) / static_cast<double>(row.tile_m + row.tile_n);
    const int turned = (plan.a_along_k ? 0 : 1) + (plan.b_along_k ? 0 : 1);
    const double parts =
        static_cast<double>(plan.parts_per_split) * (1 + rows) / 2 * (1 + turned * row.turned);
    const auto bytes = static_cast<double>(element_size(c.input));
    Work work;
    const double of_split = plan.splits > 1 && !plan.in_memory ? row.of_split : 0;
    work.threads = (row.of_block + parts * row.of_part + of_split) * rounds(row, of_one);
    if (plan.in_memory) {
      work.beside_cycles = row.of_memory + reduce_[c.math]->cost_fixed;
      work.beside_bytes = 2 * kSumBytes * batch * m * n * static_cast<double>(plan.splits);
    }
    work.bytes = bytes * batch * (k * (m + n) + m * n);
    work.bytes_again = row.again * bytes * batch * k * (m * (tiles_n - 1) + n * (tiles_m - 1));
    return work;
  }

  // How often a block's time passes on the multiprocessor that has the most of them, `slots` at a
  // time; of many blocks, in the mean (H200, 500 products: 8% of the time off, 11% by the mean of
  // few ones, too).
  static double rounds(const AnywhereRow& row, double of_one) {
    const auto slots = static_cast<double>(row.slots);
    const auto together = [&](double blocks) {
      return blocks == 0 ? 0 : 1 + (blocks - 1) * row.beside;
    };
    if (of_one > 2 * slots) return of_one / slots * together(slots);
    const double most = std::ceil(of_one), full = std::floor(most / slots);
    return full * together(slots) + together(most - full * slots);
  }

  static constexpr const char* kReduce = "reduce";

  const Device& device_;
  std::vector<AnywhereRow> rows_;
  std::optional<PortableRow> reduce_[kMathCount];
  ClusterCapacity clusters_{kAnywhereMostSplits};
};

const MatmulBackendOf<Anywhere, MatmulParams> g_anywhere("matmul", {"anywhere", "reduce"});

}  // namespace
}  // namespace torch_cubin
