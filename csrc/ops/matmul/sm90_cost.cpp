#include "ops/matmul/sm90_cost.h"

#include <algorithm>
#include <cmath>

#include "ops/matmul/sm90_correction.h"

namespace torch_cubin {
namespace {

constexpr const char* kSm90MathNames[] = {"float16", "bfloat16", "tf32"};
constexpr const char* kSm90LayoutNames[] = {"nn", "nt", "tn", "tt"};

// Fitted to 1,471 timings of 132 products on an H200, kReadAgain to those of an H100. Of 603
// products in the sweeps of both GPUs, what it chooses takes 3.1% longer than the best config on
// average (benchmarks/sm90/fit_cost.py, which has the model and these constants again). Its clock
// is that of short products; long ones are bound by power.
constexpr double kCyclesPerMicrosecond = 1950;
constexpr double kL2BytesPerCycle = 80;         // what one multiprocessor gets
constexpr double kFlopsPerMicrosecond = 750e6;  // of bfloat16, at the power limit
constexpr double kSm90MemoryShare = 0.773;      // of the memory's peak: 3.8 of an H200's 4.92 TB/s
// An operand that more than one cluster reads takes so much of the memory's time more: 256 x 8192 x
// 28672 by 128x128 took 224 us on an H100, 219 in pairs that share A, 194 in pairs that share B,
// read once then.
constexpr double kReadAgain = 0.2;
constexpr double kFixed = 1.5;       // us: first loads, last stores
constexpr double kTileCycles = 490;  // between two tiles of a block
constexpr double kExchangeBytesPerCycle = 13.7;
constexpr double kExchangeFixed = 0.58;  // us
constexpr double kStreamFixed = 12;      // us, with the launch that sets counters to zero
constexpr double kStreamBytesPerCycle = 15.2;
// Blocks that share an operand wait for one another.
constexpr double kShareCycles = 1.03, kShareFixed = 0.11;  // us
// A box's row of 128 bytes that does not begin at a line of the cache takes two requests.
constexpr double kSplitLines = 2.3;
// At the power limit energy decides: this share of a product's is what shared memory moves, which
// is kLeastShared cycles a multiply-add with 256x192, the tile that moves least.
constexpr double kEnergyOfShared = 0.2, kLeastShared = 0.03;
// Rows and columns of a tile outside the matrices, which the TMA fills with zeros, cost more than
// others: 64 x 4096 x 4096 with tiles of 128 x 64 took 19 us, 128 x 4096 x 4096 took 12.
constexpr double kOutside = 1.13;
// A device holds fewer blocks in clusters of four than it has multiprocessors, since these come in
// groups of 16 or 18: 30 of 33 on an H200, and 15 of 16 of eight. And more blocks wait for one
// another: the timings of eight do not tell this constant from that of four.
constexpr int64_t kFoursOf = 11, kFoursFound = 10;
constexpr double kFourFixed = 0.25;  // us
// Where nearly all clusters of four that fit are needed and an eighth of their tiles lie
// outside, they took longer (2536 x 800 x 3920 by 128 x 160: 39 us in 30 of 2 x 2, 27 in 25 of 1 x
// 4).
constexpr int64_t kFoursSure = 28;
constexpr double kFourCrowded = 1.12;
// us that a block waits at the start for each other one that reads the same 64 rows, where there
// are many and rows do not begin at lines of the cache (184 x 5736 x 40: 4.4 us without clusters,
// 3.4 in fours).
constexpr double kCrowdedRows = 0.011, kCrowdedFrom = 24;
// What stores of a tile take where products are too short to hide them and rows of the output begin
// anywhere: bytes a cycle, of panels of 64 columns and of narrower ones.
constexpr double kStoreAnywhereBytes = 10, kStoreNarrowBytes = 7;
// A stage whose operands are read by threads: its latency, and cycles for 128 bytes.
constexpr double kReadFixed = 1400, kReadLine = 8;
// Sums of a split, written and read: bytes a microsecond, of the L2 cache; bytes a cycle of one
// block, which writes them through shared memory, four columns at a time or single ones; us.
constexpr double kSplitBytesPerMicrosecond = 4e6, kSplitFixed = 0.7;
constexpr double kSumsBytesPerCycle = 8, kSingleSumsBytesPerCycle = 3;
constexpr int64_t kMostSumsBytes = 64 << 20;
constexpr int64_t kLeastSplitBlocks = 4;  // k blocks
constexpr int32_t kMostSplits = 16;
// Blocks of one computing warpgroup are slower than their bounds.
constexpr double kOneWarpgroup = 1.085;
constexpr int64_t kLeastStreamBlocks = 8;  // k blocks of a part of a streamed tile
constexpr int64_t kLeastSplitK = 512;

// The fourth root of the sum of fourth powers: two bounds that are near one another both cost. Made
// of square roots, which are instructions: std::pow would need a newer glibc than 2.28.
double smooth_max(double x, double y, double z) {
  const double x2 = x * x, y2 = y * y, z2 = z * z;
  return std::sqrt(std::sqrt(x2 * x2 + y2 * y2 + z2 * z2));
}

// What the TMA loads of an operand: whole panels of 64 where its own dim is contiguous.
double loaded_size(int64_t tile, bool mn_major) {
  return static_cast<double>(mn_major ? ceil_div(tile, int64_t{64}) * 64 : tile);
}

// Cycles of shared memory (128 bytes each) for 128 bytes of K: what the TMA writes and wgmma, which
// computes 64 rows at a time, reads.
double shared_cycles(const Sm90Row& row) {
  return loaded_size(row.tile_m, row.a_mn_major) + loaded_size(row.tile_n, row.b_mn_major) +
         static_cast<double>(row.tile_m) / 64 * static_cast<double>(64 + row.tile_n);
}

// Cycles of one block for 128 bytes of K: the tensor cores, shared memory, and what the L2 cache
// delivers, or what the producer's threads read.
double k_block_cycles(const Sm90Row& row, const Sm90Plan& plan, const MatmulCase& c) {
  const int64_t of_a = plan.cluster.of_a, of_b = plan.cluster.of_b;
  const double a = loaded_size(row.tile_m, row.a_mn_major) * (c.a_lines ? 1 : kSplitLines);
  const double b = loaded_size(row.tile_n, row.b_mn_major) * (c.b_lines ? 1 : kSplitLines);
  double loaded = 0, read = 0;
  (plan.reads_a ? read : loaded) += a / static_cast<double>(of_a);
  (plan.reads_b ? read : loaded) += b / static_cast<double>(of_b);
  const double multiplied = static_cast<double>(row.tile_m * row.tile_n) / 32;
  const double waits = of_a * of_b > 1 ? kShareCycles : 1;
  const double cycles = (row.one_warpgroup ? kOneWarpgroup : 1) * waits *
                        smooth_max(multiplied, shared_cycles(row), loaded * 128 / kL2BytesPerCycle);
  return read > 0 ? std::max(cycles, kReadFixed + kReadLine * read / kSplitLines) : cycles;
}

class Chooser {
 public:
  Chooser(const MatmulCase& problem, const Sm90Capacity& capacity)
      : c_(problem),
        multiprocessors_(capacity.multiprocessors),
        largest_cluster_(capacity.cluster),
        correction_(problem.math != kMathTF32 && problem.m > kSm90FewRows &&
                            problem.n > kSm90FewRows
                        ? capacity.correction
                        : nullptr) {
    const double element = problem.math == kMathTF32 ? 4 : 2;
    const double batch = static_cast<double>(c_.batch);
    const auto m = static_cast<double>(c_.m), n = static_cast<double>(c_.n),
               k = static_cast<double>(c_.k);
    // TF32 has half the rate of 16-bit types.
    power_ = 2 * batch * m * n * k * (element / 2) / kFlopsPerMicrosecond;
    const double rate = kSm90MemoryShare * capacity.memory_bytes_per_microsecond;
    memory_of_a_ = batch * element * m * k / rate;
    memory_of_b_ = batch * element * k * n / rate;
    memory_of_c_ = batch * element * m * n / rate;
  }

  void consider(const Sm90Row& row) {
    const int64_t tiles_m = ceil_div(c_.m, row.tile_m), tiles_n = ceil_div(c_.n, row.tile_n);
    const int64_t k_blocks = ceil_div(c_.k, row.tile_k);
    // Sizes, and numbers of tiles and of k blocks, are 32-bit on the device.
    constexpr int64_t kMostRows = (int64_t{1} << 31) - 2048;  // the last cluster's tiles fit, too
    constexpr int64_t kMostTiles = int64_t{1} << 30;
    if (c_.m > kMostRows || c_.n > kMostRows || c_.k > kMostTiles) return;
    if (static_cast<double>(tiles_m + 1) * static_cast<double>(tiles_n + 1) *
            static_cast<double>(c_.batch) >
        static_cast<double>(kMostTiles)) {
      return;
    }
    const int64_t tiles = tiles_m * tiles_n * c_.batch;
    const bool reads_a = !is_vectors(c_.a), reads_b = !is_vectors(c_.b);
    for (const Sm90Cluster& cluster : kSm90Clusters) {
      const int64_t of_a = cluster.of_a, of_b = cluster.of_b, size = cluster.size();
      if ((of_a > 1 && tiles_n < of_a) || (of_b > 1 && tiles_m < of_b)) continue;
      // Each block loads whole groups of 8 rows. (Of a tile that is not K-major it loads a share of
      // its K, of TF32 in clusters of eight along N half a group: the swizzle goes by addresses.)
      if (row.tile_m % (8 * of_a) != 0 || row.tile_n % (8 * of_b) != 0) continue;
      if (size > largest_cluster_ || (size > 1 && (reads_a || reads_b))) continue;
      const int64_t slots =  // clusters that run at a time
          size >= 4 ? multiprocessors_ * kFoursFound / kFoursOf / size : multiprocessors_ / size;
      if (slots == 0) continue;
      Sm90Plan plan;
      plan.row = &row;
      plan.cluster = cluster;
      plan.reads_a = reads_a;
      plan.reads_b = reads_b;
      plan.tiles_m = static_cast<int32_t>(ceil_div(tiles_m, of_b));
      plan.tiles_n = static_cast<int32_t>(ceil_div(tiles_n, of_a));
      const int64_t cluster_tiles = c_.batch * plan.tiles_m * plan.tiles_n;
      plan.whole_tiles = static_cast<int32_t>(cluster_tiles);
      plan.clusters = static_cast<int32_t>(std::min(slots, cluster_tiles));
      const double inside = static_cast<double>(c_.m) / static_cast<double>(tiles_m * row.tile_m) *
                            static_cast<double>(c_.n) / static_cast<double>(tiles_n * row.tile_n);
      const bool outside = 8 * tiles < 7 * cluster_tiles * size;
      const bool crowded =
          size == 4 && outside && cluster_tiles > kFoursSure && cluster_tiles <= slots;
      const double k_block = k_block_cycles(row, plan, c_) * (1 + kOutside * (1 - inside)) *
                             (crowded ? kFourCrowded : 1);
      const double readers_of_a = readers(reads_a || c_.a_lines, tiles_n / of_a, row.tile_m);
      const double readers_of_b = readers(reads_b || c_.b_lines, tiles_m / of_b, row.tile_n);
      const double extra = (size >= 4   ? kFourFixed
                            : size == 2 ? kShareFixed
                                        : 0) +
                           kCrowdedRows * std::max(readers_of_a, readers_of_b);
      if (c_.split_sums) {
        if (!cluster.splits_k) split(plan, slots, k_blocks, k_block, extra);
        continue;
      }
      const double waves = std::max(1.0, static_cast<double>(cluster_tiles) / slots);
      if (cluster.splits_k) {
        if (!row.pairs || cluster_tiles > slots || c_.k < kLeastSplitK) continue;
        if (c_.batch_invariant || c_.row_parts) continue;
        const double exchange = static_cast<double>(row.tile_m * row.tile_n * 4) /
                                    kExchangeBytesPerCycle / kCyclesPerMicrosecond +
                                kExchangeFixed;
        keep(plan, ceil_div(k_blocks, 2) * k_block, waves, exchange);
        continue;
      }
      const double tile = k_blocks * k_block;
      keep(plan, ceil_div(cluster_tiles, slots) * tile, waves, extra + stores(row, tile, waves));
      // Fewer than two waves are streamed for weight gradients (TN) alone: 256 x 8192 x 28672 NT
      // takes 205 us so on an H200, and 198 by the best config that does not stream.
      const bool is_tn = row.a_mn_major && row.b_mn_major;
      if (row.streams && size <= 2 && !c_.batch_invariant &&
          (is_tn || tiles >= 2 * multiprocessors_)) {
        stream(plan, slots, k_blocks, k_block, waves);
      }
    }
  }

  const Sm90Config& best() const { return best_; }

  // Where all configs are put, too, not only the best one.
  std::vector<Sm90Config>* all = nullptr;

 private:
  // Blocks that read the same rows at the same time, counted for each 64 rows, where they are too
  // many.
  double readers(bool none, int64_t blocks, int64_t rows) const {
    const auto readers = static_cast<double>(std::min(blocks, multiprocessors_) * rows) / 64;
    return none ? 0 : std::max(0.0, readers - kCrowdedFrom);
  }

  // The last, partial wave of tiles, its K split over all clusters, or, where waves are few, in
  // equal parts over as many as that takes. Parts that are not equal stand at different k, so that
  // little of what one cluster has read is still in the L2 cache for another, but what blocks
  // share: 2304 x 768 x 32768 took 1.6 times cuBLAS's time so.
  void stream(const Sm90Plan& plan, int64_t slots, int64_t k_blocks, double k_block, double waves) {
    const int64_t whole = plan.whole_tiles / slots, rest = plan.whole_tiles % slots;
    if (rest == 0) return;
    const int64_t parts = std::min(slots, rest * k_blocks / kLeastStreamBlocks);
    const int64_t even = parts / rest * rest;
    if (whole >= kSm90ManyWaves || (plan.cluster.size() > 1 && even != parts)) {
      stream_over(plan, std::max(rest, parts), slots, k_blocks, k_block, waves);
    }
    if (whole < kSm90ManyWaves && even > rest) {
      stream_over(plan, even, whole == 0 ? even : slots, k_blocks, k_block, waves);
    }
  }

  // `clusters` divide the k blocks of the tiles that do not fill a wave of `slots`.
  void stream_over(Sm90Plan plan, int64_t clusters, int64_t slots, int64_t k_blocks, double k_block,
                   double waves) {
    const int64_t whole = plan.whole_tiles / slots, rest = plan.whole_tiles % slots;
    if (clusters * rest * k_blocks >= (int64_t{1} << 31)) return;
    plan.clusters = static_cast<int32_t>(slots);
    plan.stream_tiles = static_cast<int32_t>(rest);
    plan.stream_clusters = static_cast<int32_t>(clusters);
    plan.whole_tiles -= plan.stream_tiles;
    const double share = static_cast<double>(clusters) / static_cast<double>(rest);
    const double extra = kStreamFixed + static_cast<double>(plan.row->tile_m * plan.row->tile_n) *
                                            4 * share / kStreamBytesPerCycle /
                                            kCyclesPerMicrosecond;
    keep(plan, (static_cast<double>(whole) + 1 / share) * k_blocks * k_block, waves,
         extra + stores(*plan.row, k_blocks * k_block, waves));
  }

  // Parts of K, each of whose sums are a matrix of their own.
  void split(Sm90Plan plan, int64_t slots, int64_t k_blocks, double k_block, double extra) {
    const double outputs = static_cast<double>(c_.m) * static_cast<double>(c_.n);
    const int64_t tiles = plan.whole_tiles;
    int32_t last = 1;
    for (int32_t wanted = 2; wanted <= kMostSplits; ++wanted) {
      const int64_t blocks = ceil_div(k_blocks, int64_t{wanted});
      const auto splits = static_cast<int32_t>(ceil_div(k_blocks, blocks));  // none is empty
      const double bytes = outputs * 4 * splits;
      if (blocks < kLeastSplitBlocks || bytes > kMostSumsBytes || tiles * (splits - 1) >= 2 * slots)
        break;
      if (splits == last) continue;
      last = splits;
      plan.splits = splits;
      plan.split_blocks = static_cast<int32_t>(blocks);
      plan.whole_tiles = static_cast<int32_t>(tiles * splits);
      plan.clusters = static_cast<int32_t>(std::min(slots, tiles * splits));
      const double waves = std::max(1.0, static_cast<double>(tiles * splits) / slots);
      const auto turns = static_cast<double>(ceil_div(tiles * splits, slots));
      const double stored = turns * static_cast<double>(plan.row->tile_m * plan.row->tile_n * 4) /
                            (c_.n % 4 == 0 ? kSumsBytesPerCycle : kSingleSumsBytesPerCycle);
      keep(plan, turns * blocks * k_block + stored, waves,
           extra + kSplitFixed + 2 * bytes / kSplitBytesPerMicrosecond);
    }
  }

  // What a block waits for stores. A tile's products are half done when one warpgroup of two begins
  // to store the tile before.
  double stores(const Sm90Row& row, double tile_cycles, double waves) const {
    if (c_.n * element_size(c_.output) % kVectorBytes == 0) return 0;
    const double bytes =
        static_cast<double>(row.tile_m * row.tile_n) * static_cast<double>(element_size(c_.output));
    const double hidden = row.one_warpgroup ? 0 : tile_cycles / 2;
    const double stored = bytes / (row.tile_n % 64 == 0 ? kStoreAnywhereBytes : kStoreNarrowBytes);
    const double last = std::max(0.0, stored - tile_cycles);
    return ((waves - 1) * std::max(0.0, stored - hidden) + last) / kCyclesPerMicrosecond;
  }

  // Of the memory: each row of clusters reads B, each column A.
  double memory(const Sm90Plan& plan) const {
    const auto again = [](int32_t clusters) { return clusters > 1 ? 1 + kReadAgain : 1; };
    return memory_of_a_ * again(plan.tiles_n) + memory_of_b_ * again(plan.tiles_m) + memory_of_c_;
  }

  void keep(const Sm90Plan& plan, double cycles, double waves, double extra) {
    const double compute = (cycles + waves * kTileCycles) / kCyclesPerMicrosecond + extra;
    const Sm90Row& row = *plan.row;
    const double shared =
        shared_cycles(row) / static_cast<double>(row.tile_m * row.tile_n) / kLeastShared;
    const double power = power_ * (1 + kEnergyOfShared * (shared - 1));
    const double factor = correction_ == nullptr ? 1 : correction_->factor(plan);
    const double microseconds = factor * (smooth_max(compute, power, memory(plan)) + kFixed);
    if (all != nullptr) all->push_back({plan, microseconds});
    if (microseconds < best_.microseconds) best_ = {plan, microseconds};
  }

  const MatmulCase& c_;
  const int64_t multiprocessors_, largest_cluster_;
  const Sm90Correction* const correction_;  // null: none
  // us that they alone would take
  double power_, memory_of_a_, memory_of_b_, memory_of_c_;
  Sm90Config best_;
};

void consider_rows(Chooser& chooser, const std::vector<Sm90Row>& rows, const MatmulCase& problem) {
  const bool a_mn_major = !is_along_k(problem.a), b_mn_major = !is_along_k(problem.b);
  const bool reads = !is_vectors(problem.a) || !is_vectors(problem.b);
  for (const Sm90Row& row : rows) {
    if (reads != row.reads || (problem.row_parts && !row.adds_rows())) continue;
    // TF32 whose rows cannot be mapped goes to portable kernels, which round otherwise.
    if (problem.batch_invariant && row.from_registers()) continue;
    if (row.math == problem.math && row.a_mn_major == a_mn_major && row.b_mn_major == b_mn_major) {
      chooser.consider(row);
    }
  }
}

}  // namespace

Sm90Row::Sm90Row(PackageKernel& entry) : kernel(&entry) {
  const KernelFields fields(entry);
  math = static_cast<Math>(fields.index("math", kSm90MathNames));
  const std::string layout = kSm90LayoutNames[fields.index("layout", kSm90LayoutNames)];
  a_mn_major = layout[0] == 't';
  b_mn_major = layout[1] == 'n';
  int64_t tile[3];
  fields.triple("tile", 1, tile);
  tile_m = tile[0];
  tile_n = tile[1];
  tile_k = tile[2];
  threads = entry.entry().block[0];
  one_warpgroup = threads == 256;
  streams = fields.integer("streams", 0, 1) != 0;
  pairs = fields.integer("pairs", 0, 1) != 0;
  reads = fields.integer("reads", 0, 1) != 0;
}

Sm90Config plan_sm90(const std::vector<Sm90Row>& rows, const MatmulCase& problem,
                     const Sm90Capacity& capacity) {
  Chooser chooser(problem, capacity);
  consider_rows(chooser, rows, problem);
  return chooser.best();
}

std::vector<Sm90Config> sm90_configs(const std::vector<Sm90Row>& rows, const MatmulCase& problem,
                                     const Sm90Capacity& capacity) {
  std::vector<Sm90Config> all;
  Chooser chooser(problem, capacity);
  chooser.all = &all;
  consider_rows(chooser, rows, problem);
  return all;
}

std::string sm90_name(const Sm90Plan& plan) {
  const bool reads = plan.reads_a || plan.reads_b;
  return std::to_string(plan.row->tile_m) + "x" + std::to_string(plan.row->tile_n) +
         plan.cluster.name + (reads ? " read" : "") +
         (plan.splits > 1 ? " " + std::to_string(plan.splits) + " splits" : "") +
         (plan.stream_tiles == 0  ? ""
          : plan.streams_evenly() ? " streamed evenly"
                                  : " streamed");
}

}  // namespace torch_cubin
