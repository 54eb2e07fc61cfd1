#include "ops/matmul/portable_configs.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

namespace torch_cubin {
namespace {

constexpr int kSplits[] = {1,  2,  3,  4,  5,  6,  7,  8,   10,  12,  14,  16,  20,
                           24, 28, 32, 40, 48, 64, 96, 128, 192, 264, 384, 528, 660};
constexpr int64_t kMostPortableSplits = std::end(kSplits)[-1];

constexpr int64_t kShortKTiles = 8;  // whose loads are in flight together

using Price = std::function<double(const Work&)>;
using Offer = std::function<void(const PortablePlan&, const Work&)>;

int64_t accumulator_bytes(Math math) { return math == kMathFloat64 ? 8 : 4; }
int64_t element_bytes_of(Math math) {
  return math == kMathFloat64 ? 8 : math == kMathFloat16 || math == kMathBFloat16 ? 2 : 4;
}

// The product as one kernel row sees it.
struct Extent {
  int64_t m, n, k, batch;
};

// The share of the blocks that a multiprocessor can hold which it holds, of `blocks` in all.
double held_share(const PortableRow& row, double blocks, int64_t multiprocessors) {
  const int64_t slots_of_one = row.slots / multiprocessors;
  const auto full = static_cast<double>(slots_of_one);
  return std::min(full, std::max(1.0, std::ceil(blocks / multiprocessors))) / full;
}

// The waits of a k tile where rows of a vector kernel's operand end within a vector: a block then
// reads that vector's elements one by one and stores them, in every k tile where the rows run along
// M or N. (On an H200 135 x 1086 x 4836 took 90 us for 11.)
int straddle_waits(const PortableRow& row, const MatmulCase& problem) {
  // TF32 kernels of any strides put columns of an operand to rows of shared memory, an element at a
  // time (H200, x.t() @ x of 377 x 1258 and 134 x 3128: 17 us, 9 and 7 predicted).
  if (problem.math == kMathTF32 && row.alignment < kVectorBytes) {
    return problem.a == kOwnElements && problem.b == kOwnElements ? 1 : 0;
  }
  const bool vectors = row.kind == kMatmulMma || row.kind == kMatmulPersistent;
  if (!vectors || row.alignment < kVectorBytes) return 0;
  const int64_t in_vector = kVectorBytes / element_bytes_of(problem.math);
  const bool a = problem.a == kOwnVectors && problem.m % in_vector != 0;
  const bool b = problem.b == kOwnVectors && problem.n % in_vector != 0;
  return 2 * ((a ? 1 : 0) + (b ? 1 : 0));
}

// Bytes of split-K partials that a product may take.
int64_t workspace_limit(Math math) { return int64_t{math == kMathFloat64 ? 512 : 128} << 20; }

// Tiles of 64 x 64 a multiprocessor.
double filling(const PortableTable& table, const Extent& x) {
  constexpr int64_t kTile = 64;
  const auto tiles = static_cast<double>(ceil_div(x.m, kTile) * ceil_div(x.n, kTile));
  return tiles * static_cast<double>(x.batch) / static_cast<double>(table.multiprocessors);
}

// Fewest splits that keep the error of float64 near that of PyTorch, which splits a long K by how
// far the outputs fill the device. On the H200, by its errors: into 4 to 30 parts where they are up
// to 1.5 tiles of 64 x 64 a multiprocessor (chains of 1,024 terms have its error for 64 x 6144 x
// 4096, up to 2.5 times that for 16 rows; one of 20,000 three times for 1024 x 768), into 2 to 8 up
// to 4.5 tiles, else not at all.
// Errors fall with the square root of the splits. Fewer where the partials have no memory.
int64_t least_splits(Math math, const PortableRow& row, double tiles_each, const Extent& x,
                     int64_t k_tiles, double partial_bytes) {
  constexpr int64_t kFewRows = 32;
  const int64_t longest_chain = std::min(x.m, x.n) > kFewRows ? 1024 : 512;
  if (row.clusters()) {
    constexpr int64_t kSlicedChain = 512;
    return std::min<int64_t>(ceil_div(x.k, kSlicedChain * row.slices), kMostInCluster);
  }
  if (math != kMathFloat64) return 1;
  const auto fitting = static_cast<int64_t>(workspace_limit(math) / partial_bytes);
  const int64_t least =
      std::min({ceil_div(x.k, longest_chain), k_tiles / 2, kMostPortableSplits, fitting * 2 / 3});
  if (row.dot()) return least;  // a dot kernel's lanes share K out already
  const double filling = 2 * tiles_each <= 3   ? std::ceil(12 / tiles_each)
                         : 2 * tiles_each <= 9 ? 3
                                               : 1;
  return std::min(least, static_cast<int64_t>(filling));
}

// K tiles that are added in one chain, of a batch-invariant product: by K alone; 0: all. Few rows
// of float64 gain by four chains from K of 4,096 on (H200, 64 x 4096 x 4096 142 -> 52 us); more of
// a shorter K cost many rows 2% (2048 x 2048 x 2048).
int64_t chain_tiles(Math math, const PortableRow& row, int64_t k) {
  constexpr int64_t kChains = 4, kLongK = 4096, kWhole = 64;
  if (row.kind == kMatmulSimt) return row.chain / row.tile_k;
  if (math != kMathFloat64 || k < kLongK) return 0;
  return ceil_div(ceil_div(k, kChains), kWhole) * kWhole / row.tile_k;
}

// K tiles in whose time a block's warps add all chains of K, each a whole one: those of a last
// round take as long as all warps', or 2/3 if a scheduler has one at most (H200, 64 x 4096, us: K
// of 2048 27, of 1280 28, of 1024 19; by 64x48 K of 4096 81, of 3072 65).
int64_t chains_k_tiles(const PortableRow& row, int64_t k) {
  constexpr int64_t kSchedulers = 4;
  const int64_t chains = ceil_div(k, row.chain), of_round = row.slices * row.chain / row.tile_k;
  const int64_t rest = chains % row.slices;
  const int64_t last = rest == 0 ? 0 : rest > kSchedulers ? of_round : of_round * 2 / 3;
  return chains / row.slices * of_round + last;
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

// Shared memory with which no multiprocessor holds more blocks than its share of them. Blocks that
// start while those of the kernel before end would else crowd where these end first: 64 x 4096 x
// 4096 of float32 in 256 blocks of which three fit took 81 us on an H200, of which two fit 55.
int64_t shared_for(const PortableTable& table, const PortableRow& row, double blocks) {
  const bool rings = row.rings() || row.math == kMathFloat64;
  const auto each = static_cast<int64_t>(std::ceil(blocks / table.multiprocessors));
  if (!rings || row.dot() || each >= row.slots / table.multiprocessors) return -1;
  const int64_t shared = table.shared_each / (each + 1) - kSharedOfBlock / 2;
  // A device may hold fewer blocks than the arch for which the kernel was compiled.
  return shared > row.kernel->entry().dynamic_shared ? shared : -1;
}

// Results of a tile that lanes store one by one, where rows of C are not whole vectors, count as
// four of other kernels (H200, TF32 by 128x128x32: 134 x 134 and 950 x 950 took 3 to 6 us longer).
int single_values(const PortableRow& row, const MatmulCase& problem) {
  constexpr int kOfOne = 4;
  const bool vectors = row.kind == kMatmulMma || row.kind == kMatmulPersistent;
  return vectors && row.alignment >= kVectorBytes && !problem.out_vectors ? kOfOne : 0;
}

void count(const PortableTable& table, const MatmulCase& problem, const PortableRow& row,
           const Extent& x, bool swapped, const Price& price, const Offer& offer) {
  const Math math = problem.math;
  const bool batch_invariant = problem.batch_invariant;
  const bool sums_alone = problem.output != problem.input;
  const PackageKernel* reduce = table.reduce[sums_alone ? kMathFloat32 : math];
  // float32 is added up in chains: the largest tiles have one of all of K.
  if (batch_invariant && row.kind == kMatmulSimt && row.chain == 0) return;
  if (row.invariant_alone && !batch_invariant) return;
  // Slices have an order of their own, if they are no chains; and of fewer rows PyTorch's error is
  // less (16 x 6144 x 4096: 0.55 of that of slices). Blocks of chains whose tile is not whole are
  // the last to end (H200, us: 64 x 4096 x 4096 NT by 64x48 104, NN 79; 33 x 8192 x 2048 by 64x32
  // 67, for 54).
  const bool is_sliced = row.kind == kMatmulSliced;
  if (is_sliced && ((batch_invariant && row.chain == 0) || 2 * x.m <= row.tile_m)) return;
  const bool slices_chains = is_sliced && row.chain > 0;
  if (slices_chains && (x.m % row.tile_m != 0 || x.n % row.tile_n != 0)) return;
  PortablePlan plan;
  plan.kernel = row.kernel;
  plan.swapped = swapped;
  plan.tiles_m = ceil_div(x.m, row.tile_m);
  plan.tiles_n = ceil_div(x.n, row.tile_n);
  const int64_t k_tiles = ceil_div(x.k, row.tile_k);
  const double tiles = static_cast<double>(plan.tiles_m) * plan.tiles_n * x.batch;
  const double outputs = static_cast<double>(x.m) * x.n * x.batch;
  Work work;
  work.bytes =
      element_bytes_of(math) *
      (x.batch * (static_cast<double>(x.m) * x.k + static_cast<double>(x.k) * x.n) + outputs);
  const double split_bytes = outputs * accumulator_bytes(math);
  const int64_t least =
      batch_invariant ? 1 : least_splits(math, row, filling(table, x), x, k_tiles, split_bytes);
  PortablePlan best;
  Work best_work;
  double least_price = std::numeric_limits<double>::infinity();
  // A block adds the chains of its K in their order (of float64 by a flag), so that each may be
  // another block's.
  const int64_t of_chain = chain_tiles(math, row, x.k);
  const bool chained = batch_invariant && of_chain > 0;
  const bool whole = !chained && (batch_invariant || slices_chains);
  const int64_t most = chained ? ceil_div(k_tiles, of_chain) : whole ? 1 : k_tiles;
  plan.in_order = chained;
  for (const int64_t each : kSplits) {
    const int64_t wanted = chained && each > 1 ? most : each;
    if (each > most || wanted > kMostPortableSplits) break;
    if (wanted > 1 && wanted < least) continue;
    plan.k_tiles_per_split = chained ? of_chain : ceil_div(k_tiles, wanted);
    const int64_t splits = ceil_div(k_tiles, plan.k_tiles_per_split);  // none is empty
    plan.splits = static_cast<int32_t>(chained && each == 1 ? 1 : splits);
    plan.clusters = row.clusters();
    if (plan.clusters && plan.splits > kMostInCluster) break;
    plan.reduces = plan.splits > 1 && !plan.clusters;
    work.clusters = plan.splits > 1 && plan.clusters;
    const double partial = plan.splits * split_bytes;
    if (plan.reduces && (reduce == nullptr || partial > workspace_limit(math))) break;
    const double blocks = tiles * plan.splits;
    const double turns = std::max(1.0, std::ceil(blocks / row.slots));
    // A lone block runs faster than at full occupancy, down to what latency takes.
    const double held = held_share(row, blocks, table.multiprocessors);
    const double k_tile = row.cost_k_tile * std::max(held, row.cost_lone);
    const bool short_k = wanted == 1 && k_tiles <= kShortKTiles;
    const double fixed = row.cost_fixed * (short_k ? std::max(held, row.cost_lone_fixed) : 1);
    const int64_t all_k_tiles = slices_chains ? chains_k_tiles(row, x.k) : k_tiles;
    const int64_t of_block = plan.splits == 1 ? all_k_tiles : plan.k_tiles_per_split;
    const double k_tiles_of_one = turns * static_cast<double>(of_block);
    work.threads = k_tiles_of_one * k_tile + turns * fixed;
    work.waits = k_tiles_of_one * straddle_waits(row, problem);
    work.values = plan.reduces ? 0
                               : turns * static_cast<double>(row.tile_m * row.tile_n) *
                                     single_values(row, problem);
    work.beside_cycles = plan.reduces ? table.reduce_cycles[sums_alone ? kMathFloat32 : math] : 0;
    work.beside_bytes = plan.reduces ? 2 * partial : 0;
    work.correction = row.correction;
    work.inaccurate = wanted < least && !row.dot();
    // Of several tiles of a block only the last may be left as sums.
    plan.blocks = sums_alone ? plan.tiles_m * plan.tiles_n * x.batch : blocks_for(row, x, plan);
    if (plan.clusters) plan.blocks *= plan.splits;
    plan.dynamic_shared = shared_for(table, row, blocks);
    const double priced = price(work);
    if (priced < least_price) {
      least_price = priced;
      best = plan;
      best_work = work;
    }
    // Where the device is full, more splits only cost.
    if (wanted == most || blocks >= 4 * static_cast<double>(row.slots)) break;
  }
  if (best.kernel != nullptr) offer(best, best_work);
}

Layout layout_of(const MatmulCase& access) {
  if (!is_vectors(access.a) || !is_vectors(access.b)) return kLayoutAny;
  if (access.a == kKVectors) return access.b == kKVectors ? kLayoutNT : kLayoutNN;
  return access.b == kKVectors ? kLayoutTT : kLayoutTN;
}

// Whether each operand is whole vectors: a single row may begin at a vector and end within one, of
// which cp.async reads a part, but memcheck counts all.
bool are_whole_vectors(const MatmulCase& problem) {
  constexpr int64_t kVector = 4;  // float32
  auto whole = [&](Access access, int64_t own) {
    return is_vectors(access) && (access == kKVectors ? problem.k : own) % kVector == 0;
  };
  return whole(problem.a, problem.m) && whole(problem.b, problem.n);
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
  const Layout layout = layout_of(problem);
  const auto* tiles = &table.tiles[math][layout];
  if (tiles->empty()) tiles = &table.tiles[math][kLayoutAny];
  for (const PortableRow& row : *tiles) {
    if (!row.chains_in_ring() || are_whole_vectors(problem)) visit(row, x, false);
  }
  // In chains of 256 terms, few rows of what those do not read: their kernels split a short K,
  // which is more accurate (129 x 257 x 65 in one chain has an error of 1.51e-5, for a limit of
  // 1.45e-5).
  if (problem.batch_invariant && (!are_whole_vectors(problem) || problem.a != kKVectors)) {
    for (const PortableRow& row : table.tiles[math][kLayoutAny]) {
      if (row.chains_in_ring()) visit(row, x, false);
    }
  }
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

void portable_configs(const PortableTable& table, const MatmulCase& problem, const Price& price,
                      const Offer& offer) {
  for_each_row(table, problem, [&](const PortableRow& row, const Extent& x, bool swapped) {
    count(table, problem, row, x, swapped, price, offer);
  });
}

}  // namespace torch_cubin
