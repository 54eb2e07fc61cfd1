#include "ops/matmul/portable_cost.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace torch_cubin {
namespace {

constexpr int kSplits[] = {1,  2,  3,  4,  5,  6,  7,  8,   10,  12,  14,  16,  20,
                           24, 28, 32, 40, 48, 64, 96, 128, 192, 264, 384, 528, 660};

// Cycles of a second kernel and its launch, fitted to timings on the H200: 1.7 us.
constexpr double kReduceFixed = 3000;
// Share of the memory's peak that a streaming kernel reaches (H200: 4.3 of 4.9 TB/s).
constexpr double kMemoryShare = 0.9;

constexpr int64_t kChainedTile = 64;  // of simt.cu

// Share of its time that a float64 product gives for the accuracy of split sums.
constexpr double kWorthOfAccuracy = 1.15;

int64_t accumulator_bytes(Math math) { return math == kMathFloat64 ? 8 : 4; }
int64_t element_bytes_of(Math math) {
  return math == kMathFloat64 ? 8 : math == kMathFloat16 || math == kMathBFloat16 ? 2 : 4;
}

// The product as one kernel row sees it.
struct Extent {
  int64_t m, n, k, batch;
};

// Cycles of a k tile for one block when a multiprocessor holds `blocks / multiprocessors` of them:
// a lone block runs faster than at full occupancy, down to what the latency of a tile takes.
double k_tile_cycles(const PortableRow& row, double blocks, int64_t multiprocessors) {
  const double full = static_cast<double>(row.slots / multiprocessors);
  const double held = std::min(full, std::max(1.0, std::ceil(blocks / multiprocessors)));
  return row.cost_k_tile * std::max(held / full, row.cost_lone);
}

// More cycles of a k tile where rows of a vector kernel's operand end within a vector: a block then
// copies that vector's elements one by one, in every k tile where the rows run along M or N. (On an
// H200 135 x 1086 x 4836 took 90 us for 11.)
constexpr double kStraddleCycles = 2200;

double straddle_cycles(const PortableRow& row, const MatmulCase& problem) {
  const bool vectors = row.kind == kMatmulMma || row.kind == kMatmulPersistent;
  if (!vectors || row.alignment < kVectorBytes) return 0;
  const int64_t in_vector = kVectorBytes / element_bytes_of(problem.math);
  const bool a = problem.a == kOwnVectors && problem.m % in_vector != 0;
  const bool b = problem.b == kOwnVectors && problem.n % in_vector != 0;
  return (a ? kStraddleCycles : 0) + (b ? kStraddleCycles : 0);
}

// Bytes of split-K partials that a product may take.
int64_t workspace_limit(Math math) { return int64_t{math == kMathFloat64 ? 512 : 128} << 20; }

// Fewest splits that keep the error of float64 near that of PyTorch, which splits a long K by how
// far the outputs fill the device. On the H200, by its errors: into 4 to 30 parts where they are up
// to 1.5 tiles of 64 x 64 a multiprocessor (chains of 1,024 terms had twice its error for 16 x 6144
// x 4096, one of 20,000 three times for 1024 x 768), into 2 to 8 up to 4.5 tiles, else not at all.
// Errors fall with the square root of the splits. Fewer where the partials have no memory.
int64_t least_splits(Math math, const PortableRow& row, double tiles_each, int64_t k,
                     int64_t k_tiles, double partial_bytes) {
  constexpr int64_t kLongestChain = 512;
  constexpr int64_t kMost = std::end(kSplits)[-1];
  if (math != kMathFloat64) return 1;
  const auto fitting = static_cast<int64_t>(workspace_limit(math) / partial_bytes);
  const int64_t least = std::min({ceil_div(k, kLongestChain), k_tiles / 2, kMost, fitting * 2 / 3});
  if (row.dot()) return least;  // a dot kernel's lanes share K out already
  const double filling = tiles_each <= 1.5 ? std::ceil(12 / tiles_each) : tiles_each <= 4.5 ? 3 : 1;
  return std::min(least, static_cast<int64_t>(filling));
}

// Blocks of a persistent kernel fetch the next tile while they finish one, which hides a tile's
// start (4096^3 in bfloat16 on the H200: 2.5% of the time). They take whole tiles only, and a K
// that fills their ring of stages. All get the same number of tiles, give or take one: more blocks
// would not end sooner.
int64_t blocks_for(const PortableRow& row, const Extent& x, const PortablePlan& plan) {
  constexpr int64_t kLeastKTiles = 4;
  const int64_t tiles = plan.tiles_m * plan.tiles_n * x.batch;
  const bool whole = x.m % row.tile_m == 0 && x.n % row.tile_n == 0 && x.k % row.tile_k == 0;
  const bool several = row.persistent() && whole && plan.splits == 1;
  if (!several || x.k < kLeastKTiles * row.tile_k) return tiles;
  return ceil_div(tiles, ceil_div(tiles, row.slots));
}

void consider(PortableConfig& best, const PortableTable& table, const MatmulCase& problem,
              const PortableRow& row, const Extent& x, bool swapped) {
  const Math math = problem.math;
  const bool batch_invariant = problem.batch_invariant;
  const bool sums_alone = problem.output != problem.input;
  const PackageKernel* reduce = table.reduce[sums_alone ? kMathFloat32 : math];
  // The float32 kernels of small tiles add up in chains of 256 terms, the others in one.
  if (batch_invariant && row.kind == kMatmulSimt && row.tile_m != kChainedTile) return;
  const int64_t tiles_m = ceil_div(x.m, row.tile_m);
  const int64_t tiles_n = ceil_div(x.n, row.tile_n);
  const int64_t k_tiles = ceil_div(x.k, row.tile_k);
  const double tiles = static_cast<double>(tiles_m) * tiles_n * x.batch;
  const double outputs = static_cast<double>(x.m) * x.n * x.batch;
  const double rate = table.bytes_per_cycle * kMemoryShare;
  const double bytes = element_bytes_of(math) * x.batch *
                       (static_cast<double>(x.m) * x.k + static_cast<double>(x.k) * x.n +
                        static_cast<double>(x.m) * x.n);
  const double split_bytes = outputs * accumulator_bytes(math);
  const int64_t least = batch_invariant ? 1
                                        : least_splits(math, row, tiles / table.multiprocessors,
                                                       x.k, k_tiles, split_bytes);
  for (const int wanted : kSplits) {
    if (wanted > k_tiles || (wanted > 1 && batch_invariant)) break;
    if (wanted > 1 && wanted < least) continue;
    const int64_t per_split = ceil_div(k_tiles, wanted);
    const auto splits = static_cast<int>(ceil_div(k_tiles, per_split));  // none is empty
    const double partial = splits * split_bytes;
    if (splits > 1 && (reduce == nullptr || partial > workspace_limit(math))) break;
    const double waves = std::max(
        1.0,
        static_cast<double>(static_cast<int64_t>((tiles * splits + row.slots - 1) / row.slots)));
    const double k_tile =
        k_tile_cycles(row, tiles * splits, table.multiprocessors) + straddle_cycles(row, problem);
    const double compute = waves * (per_split * k_tile + row.cost_fixed);
    double cycles = std::max(compute, bytes / rate + row.cost_fixed);
    if (splits > 1) cycles += kReduceFixed + 2 * partial / rate;
    if (wanted < least && !row.dot()) cycles *= kWorthOfAccuracy;
    if (cycles < best.cycles) {
      best.cycles = cycles;
      best.plan.kernel = row.kernel;
      best.plan.reduces = splits > 1;
      best.plan.tiles_m = tiles_m;
      best.plan.tiles_n = tiles_n;
      best.plan.k_tiles_per_split = per_split;
      best.plan.splits = splits;
      best.plan.swapped = swapped;
      // Of several tiles of a block only the last may be left as sums.
      best.plan.blocks = sums_alone ? tiles_m * tiles_n * x.batch : blocks_for(row, x, best.plan);
    }
    if (tiles * splits >= 4.0 * row.slots) break;  // the device is full: more splits only cost
  }
}

Layout layout_of(const MatmulCase& access) {
  if (!is_vectors(access.a) || !is_vectors(access.b)) return kLayoutAny;
  if (access.a == kKVectors) return access.b == kKVectors ? kLayoutNT : kLayoutNN;
  return access.b == kKVectors ? kLayoutTT : kLayoutTN;
}

// Rows for a small A and a B of this access; kernels that take anything where there are none.
const std::vector<PortableRow>& dots_for(const PortableTable& table, Math math, Access b) {
  const auto& rows = table.dots[math][b];
  return rows.empty() ? table.dots[math][kKElements] : rows;
}

// Calls visit(row, extent, swapped) for each kernel that takes the problem.
template <class Visit>
void for_each_row(const PortableTable& table, const MatmulCase& problem, Visit visit) {
  const Math math = problem.math;
  const Extent x = {problem.m, problem.n, problem.k, problem.batch};
  const auto* tiles = &table.tiles[math][layout_of(problem)];
  if (tiles->empty()) tiles = &table.tiles[math][kLayoutAny];
  for (const PortableRow& row : *tiles) visit(row, x, false);
  if (problem.batch_invariant)
    return;  // dot products are added up by other threads, in another order
  for (const PortableRow& row : dots_for(table, math, problem.b)) {
    if (x.m <= row.tile_m) visit(row, x, false);
  }
  for (const PortableRow& row : dots_for(table, math, problem.a)) {
    // (Swapped, they leave their sums transposed.)
    if (x.n > row.tile_m || problem.output != problem.input) continue;
    visit(row, Extent{x.n, x.m, x.k, x.batch}, true);
  }
}

}  // namespace

PortableConfig plan_portable(const PortableTable& table, const MatmulCase& problem) {
  PortableConfig best;
  for_each_row(table, problem, [&](const PortableRow& row, const Extent& x, bool swapped) {
    consider(best, table, problem, row, x, swapped);
  });
  return best;
}

std::vector<PortableConfig> portable_configs(const PortableTable& table,
                                             const MatmulCase& problem) {
  std::vector<PortableConfig> configs;
  for_each_row(table, problem, [&](const PortableRow& row, const Extent& x, bool swapped) {
    PortableConfig config;
    consider(config, table, problem, row, x, swapped);
    if (config.plan.kernel != nullptr) configs.push_back(config);
  });
  return configs;
}

}  // namespace torch_cubin
