// This file has over 500 lines because each rule of a price stands beside what was measured.
#include "ops/matmul/sm90_configs.h"

#include <algorithm>

#include "ops/common/cluster_capacity.h"

namespace torch_cubin {
namespace {

constexpr const char* kSm90MathNames[] = {"float16", "bfloat16", "tf32"};
constexpr const char* kSm90LayoutNames[] = {"nn", "nt", "tn", "tt"};

constexpr int64_t kMostSumsBytes = 64 << 20;  // of split sums
constexpr int64_t kFirstBlocks = 2;           // k blocks whose loads begin at once
constexpr int64_t kLeastSplitBlocks = 4;      // k blocks
constexpr int32_t kMostSplits = 16;
constexpr int64_t kLeastStreamBlocks = 8;    // k blocks of a part of a streamed tile
constexpr int64_t kLeastPartOfK = 128;       // of a block of a cluster that splits K
constexpr int64_t kLeastSharedColumns = 64;  // of a tile of a cluster

double share(int64_t part, int64_t all) {
  return static_cast<double>(part) / static_cast<double>(all);
}

// What the TMA loads of an operand: whole panels of 64 where its own dim is contiguous.
double loaded_size(int64_t tile, bool mn_major) {
  return static_cast<double>(mn_major ? ceil_div(tile, int64_t{64}) * 64 : tile);
}

// How many lines of the L2 cache a row of a panel takes: two where it begins within a sector of 32
// bytes, little more than one where it begins at a sector (H200, beside two for both: the regret of
// 103 aligned random products 3.4 -> 2.9%). Where an operand's own dim is contiguous, tiles that
// end within a panel load half of one more than they multiply, and two lines of some.
double lines_of(RowsBegin rows, int64_t tile, bool mn_major, bool of_gradient) {
  const bool ends_within = mn_major && tile % 64 != 0, lines = rows == RowsBegin::kAtLines;
  const double little_more = share(5, 4);
  if (!of_gradient && rows == RowsBegin::kAtSectors && !ends_within) return little_more;
  if (!of_gradient) return lines && !ends_within ? 1 : 2;
  // All blocks of a weight gradient read the same rows of K at a time: a line takes half the time
  // of one along K. Rows that begin within lines do not, and two lines where they begin within
  // sectors.
  if (lines) return ends_within ? little_more : share(1, 2);
  return ends_within ? share(3, 2) : rows == RowsBegin::kWithinSectors ? 2 : 1;
}

RowsBegin rows_begin(const MatmulCase& c, bool lines, int64_t elements) {
  constexpr int64_t kSector = 32;  // bytes
  if (lines) return RowsBegin::kAtLines;
  const bool sectors = elements * element_size(c.input) % kSector == 0;
  return sectors ? RowsBegin::kAtSectors : RowsBegin::kWithinSectors;
}

class Counter {
 public:
  Counter(const Sm90Table& table, const MatmulCase& problem, int64_t largest_cluster, bool swapped,
          const Sm90Offer& offer)
      : table_(table),
        c_(problem),
        multiprocessors_(table.multiprocessors),
        largest_cluster_(largest_cluster),
        swapped_(swapped),
        of_swapped_(swapped ? table.of_swapped : 0),
        offer_(offer) {
    const double element = problem.math == kMathTF32 ? 4 : 2;
    const double batch = static_cast<double>(c_.batch);
    const auto m = static_cast<double>(c_.m), n = static_cast<double>(c_.n),
               k = static_cast<double>(c_.k);
    bytes_of_a_ = batch * element * m * k;
    bytes_of_b_ = batch * element * k * n;
    bytes_of_c_ = batch * m * n * static_cast<double>(element_size(c_.output));
  }

  void count(const Sm90Row& row) {
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
    const bool reads_a = !is_vectors(c_.a), reads_b = !is_vectors(c_.b);
    // The kernel adds parts of K itself: a block all of them, or each block of a pair one. (More
    // blocks add them in an order that depends on a row's place: exchange() in sm90_split.cuh.)
    const bool in_parts = c_.k_parts > 1 && !c_.split_sums;
    for (const Sm90Cluster& cluster : kSm90Clusters) {
      if (in_parts && !row.parts && (c_.k_parts != 2 || cluster.of_k != 2)) continue;
      const int64_t of_a = cluster.of_a, of_b = cluster.of_b, size = cluster.size();
      if ((of_a > 1 && tiles_n < of_a) || (of_b > 1 && tiles_m < of_b)) continue;
      // Each block loads whole groups of 8 rows. (Of a tile that is not K-major it loads a share of
      // its K, of TF32 in clusters of eight along N half a group: the swizzle goes by addresses.)
      if (row.tile_m % (8 * of_a) != 0 || row.tile_n % (8 * of_b) != 0) continue;
      if (size > largest_cluster_ || (size > 1 && (reads_a || reads_b))) continue;
      // Blocks with 64 rows of a weight gradient receive as many bytes as they can, whoever loads
      // them, and in clusters also wait for one another (1024 x 1024 x 11992 by 64x128, H200: alone
      // 39.5 us, in pairs that share B 45.8; 384 x 384 x 16384 in seven splits 13.2, 16.4).
      const bool is_tn = row.is_tn();
      if (is_tn && row.one_warpgroup && size > 1 && !cluster.splits_k()) continue;
      // What a tile of 32 columns takes is the time of a stage, not its bytes (128 x 1024 x 1024,
      // H200: 64x32 alone 3.54 us, in clusters of four that share A 3.75).
      if (row.tile_n < kLeastSharedColumns && size > 1) continue;
      const int64_t slots = clusters_at_once(multiprocessors_, size);
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
      if (row.parts) plan.split_blocks = static_cast<int32_t>(k_blocks / c_.k_parts);
      outside_ = 1 - share(std::max(c_.m, row.tile_m), tiles_m * row.tile_m) *
                         share(std::max(c_.n, row.tile_n), tiles_n * row.tile_n);
      of_cluster_ = row.correction + of_swapped_ + table_.of_cluster[&cluster - kSm90Clusters];
      if (is_tn && cluster.splits_k()) of_cluster_ += table_.of_pairs_tn;
      of_whole_tiles_ = is_tn && size > 1 && !cluster.splits_k() ? table_.of_clusters_tn : 0;
      // A matrix by its own transpose: there is one operand to bring to the L2 cache, of which
      // clusters spare less (x @ x.t(), 1024 x 2048, H200: 64x128 alone 7.9 us, in clusters 9.7).
      // Small ones of x.t() @ x take as long as other weight gradients.
      if (c_.symmetric && !c_.split_sums && !(is_tn && row.one_warpgroup)) {
        const bool shares = cluster.size() > 1 && !cluster.splits_k();
        of_cluster_ += row.of_one_matrix + (shares ? table_.of_one_matrix : 0);
      }
      if (c_.split_sums) {
        if (!cluster.splits_k() && !row.ping_pong) split(plan, slots, k_blocks);
        continue;
      }
      if (cluster.splits_k()) {
        if (!row.splits_k || cluster_tiles > slots || c_.k < kLeastPartOfK * size) continue;
        if ((c_.batch_invariant && !in_parts) || c_.row_parts) continue;
        // A warpgroup stores a swapped tile, which two blocks divide by warpgroups.
        if (swapped_ && size > 2) continue;
        // Weight gradients have other configs for few tiles, and larger clusters were slower than
        // predicted (H200, 384 x 384 x 16384 by eight 18.9 us, split 13.8).
        if (is_tn && size > 2 && !row.is_narrow_tn()) continue;
        Work work = work_of(plan, 1, static_cast<double>(ceil_div(k_blocks, size)));
        fill(work, cluster_tiles * size, multiprocessors_);
        // Each of them finishes some of the tile's warps, or none.
        const int64_t warps = row.one_warpgroup ? 4 : 8;
        work.sums_bytes = tile_bytes(row) * share(size - 1, std::min(size, warps));
        work.handshakes = 1;
        offer_(plan, work, nullptr);
        continue;
      }
      const int64_t rest = cluster_tiles % slots;
      Work last = work_of(plan, 1, static_cast<double>(k_blocks), share(rest, cluster_tiles));
      fill(last, rest, slots);
      // Pairs begin once both blocks are there, half a handshake later (1024 x 1024 x 1024 by
      // 64x128, H200: alone 5.4 us, in pairs 6.1). Of larger clusters, and of a short K, nothing is
      // seen of it.
      if (size == 2 && k_blocks > kFirstBlocks) last.handshakes = share(1, 2);
      last.correction += of_whole_tiles_;
      offer_phases(plan, cluster_tiles / slots, cluster_tiles, k_blocks, last);
      const bool streams = row.streams && !c_.batch_invariant && !has_symmetric_bits();
      if (streams && size <= 2) stream(plan, slots, k_blocks);
    }
  }

 private:
  // Of the time that a cluster takes to exchange sums: stored and read, without waiting for each.
  static constexpr double kThroughMemory = 1.0 / 2;

  // Whether each element of C must have the bits of the one mirrored, though no kernel mirrors it:
  // the parts of a streamed tile begin at the finisher's.
  bool has_symmetric_bits() const { return c_.symmetric && !c_.needs_mirror; }

  static double tile_bytes(const Sm90Row& row) {  // of float32 sums
    return static_cast<double>(row.tile_m * row.tile_n) * sizeof(float);
  }

  // What the TMA takes longer for zeros of a k block than for what it loads, as bytes of that: for
  // boxes partly outside an operand smaller than a tile, 25 bytes a cycle (H200, 5736 x 80 x 368 NN
  // by 64x128 alone 5.0 us, by four that load a part of each box 4.0).
  static double filled_bytes(int64_t size, int64_t tile, bool mn_major, int64_t sharers) {
    if (size >= tile) return 0;
    const int64_t rows = mn_major ? (size % 64 == 0 ? 0 : 64) : tile - size;
    return share(4, 3) * share(rows * 128, sharers);
  }

  // Of the last tile of a block whose warpgroups take tiles in turns: one of them stores it (H200,
  // a tile a block: by 128x160 and 128x192 0.3 to 0.5 us longer than where both share the tile).
  static double alone_cycles(const Sm90Row& row) {
    return row.ping_pong ? share(3 * row.tile_m * row.tile_n, 64) : 0;
  }

  // Of a value where a warpgroup has a tile alone, and half as much again where its sums leave
  // registers for half a panel only (H200, plain and with GELU: 16384 x 4608 x 1152 by 128x128 250,
  // 286 us, by 128x192 250, 340; 1024 x 6144 x 4096 75, 79; 76, 87). Several that share a tile
  // overlap more of it.
  static double activation_cycles(const Sm90Row& row) {
    if (!row.ping_pong) return share(1, 4);
    return row.tile_m * row.tile_n > 128 * 128 ? 1 : share(2, 3);
  }

  // Whether blocks have one tile alone, and are priced as those that begin sooner (sm90.cu; in a
  // batch those of one warpgroup do not). Of a short K, whose loads are all asked for at once,
  // nothing is gained where many blocks wait for the same lines of an operand, which clusters ask
  // for once: in long outputs (H200, alone and in clusters: 184 x 5736 x 40 by 64x192 4.1 us, 3.6).
  // Nor is it where many blocks read rows that begin within sectors (80 x 6720 x 168 by 64x128 4.0,
  // 3.4).
  bool is_early(const Sm90Plan& plan, int64_t tiles, int64_t k_blocks) const {
    constexpr int64_t kLong = 16;  // times as long as wide
    const Sm90Row& row = *plan.row;
    const auto [least, most] = std::minmax(c_.m, c_.n);
    return row.is_priced_early() && (c_.batch == 1 || !row.one_warpgroup) &&
           plan.cluster.size() == 1 && tiles <= plan.clusters &&
           (k_blocks > kFirstBlocks || most <= kLong * least) &&
           !(2 * tiles >= multiprocessors_ && begins_within_sectors(row));
  }

  bool begins_within_sectors(const Sm90Row& row) const {
    return rows_of_a(c_, row.a_mn_major) == RowsBegin::kWithinSectors ||
           rows_of_b(c_, row.b_mn_major) == RowsBegin::kWithinSectors;
  }

  bool begin_at_lines(const Sm90Row& row) const {
    return rows_of_a(c_, row.a_mn_major) == RowsBegin::kAtLines &&
           rows_of_b(c_, row.b_mn_major) == RowsBegin::kAtLines;
  }

  // The busiest multiprocessor's tiles and k blocks in all, of a share of the product's tiles.
  Work work_of(const Sm90Plan& plan, int64_t tiles, double k_blocks, double part = 1) const {
    const Sm90Row& row = *plan.row;
    const bool of_gradient = row.is_tn() && !row.is_narrow_tn() && !row.reads;
    Work work = sm90_work({row.tile_m, row.tile_n, row.a_mn_major, row.b_mn_major,
                           plan.cluster.of_a, plan.cluster.of_b, rows_of_a(c_, row.a_mn_major),
                           rows_of_b(c_, row.b_mn_major), of_gradient},
                          static_cast<double>(tiles), k_blocks);
    work.l2_bytes += k_blocks * (filled_bytes(c_.m, row.tile_m, row.a_mn_major, plan.cluster.of_a) +
                                 filled_bytes(c_.n, row.tile_n, row.b_mn_major, plan.cluster.of_b));
    // The L2 cache answers requests of several multiprocessors for one line at a time, so that
    // blocks alone have some of what a cluster spares (Nsight Compute: it sends 0.6 of the sectors
    // that they ask for; H200, alone and in pairs: 512 x 4096 x 4096 by 128x128 27.2 us, 28.2,
    // 16384 x 640 x 640 by 128x128 ping-pong 21.2, 23.2). Weight gradients and tiles of one
    // warpgroup have factors for it; of rows that begin within lines as many lose by it.
    if (plan.cluster.size() == 1 && !row.one_warpgroup && !row.is_tn() && begin_at_lines(row)) {
      work.l2_bytes *= share(3, 4);
    }
    // Tiles stored transposed take longer (H200: by 0.12 to 0.25 of what their results take).
    work.threads = alone_cycles(row) + (swapped_ && row.swaps ? work.values * share(1, 64) : 0);
    // Unrounded sums without a tensor map are stored one by one, each after a read of shared memory
    // (338 x 338 x 7104 in splits 19 us, H200; 9 predicted).
    if (c_.output != c_.input && c_.n % 4 != 0 && c_.n >= row.tile_n) work.values *= 16;
    // A's tile is read from shared memory once more.
    if (row.from_registers()) work.shared += k_blocks * static_cast<double>(row.tile_m);
    if (c_.activation != kActivationNone && c_.activation != kActivationRelu) {
      work.activations = work.values * activation_cycles(row);
    }
    // Where tiles lie in one row or column no other cluster loads their own operand. Two
    // multiprocessors (a TPC) receive it at 40 bytes a cycle together (64 x 10240 x 8192, H200:
    // 80 blocks 55 us, 54 blocks 45 us); what the stages ask for at once does not wait.
    const double once = (plan.tiles_n == 1 ? share(row.tile_m, plan.cluster.of_a) : 0) +
                        (plan.tiles_m == 1 ? share(row.tile_n, plan.cluster.of_b) : 0);
    work.port_bytes = std::max(k_blocks - static_cast<double>(kFirstBlocks), 0.0) * once * 128;
    work.clusters = plan.cluster.size() > 1;
    work.outside = outside_;
    work.correction = of_cluster_;
    if (plan.reads_a || plan.reads_b) {
      // Both operands of a weight gradient take a wait each (H200: 129 x 129 x 83 4.6 us); along K
      // those of a tile's first k block one, of the next ones three quarters more (739 x 71 6.6).
      const double more =
          row.is_tn() ? k_blocks : share(3, 4) * (k_blocks - static_cast<double>(tiles));
      work.waits = k_blocks + (plan.reads_a && plan.reads_b ? more : 0);
      work.correction += table_.of_read;
    } else if (c_.batch_invariant && c_.m < row.tile_m) {
      // Longer still (32 rows of 4096 x 14336 by 64x32, H200: 50.5 us, 64 rows 31.5).
      work.waits = share(1, 5) * k_blocks;
    }
    // Sums of parts of K take time that their number does not change (H200: 1024 x 1024 x 1024 by
    // 64x128 whole 5.42 us, in parts 5.50, 128 x 2560 x 2560 by 64x64 7.57, 7.73).
    if (row.parts) {
      work.waits += share(1, 3) * static_cast<double>(tiles);
      // Beside pairs that split K (128 x 4096 x 4096 by 64x64 sharing B 12.5 us, by pairs of 128x64
      // 12.1).
      if (row.tile_n >= 64) work.correction += share(2, 9) / 5;
    }
    // Each row of clusters reads B, each column A.
    work.bytes = part * (bytes_of_a_ + bytes_of_b_ + bytes_of_c_);
    work.bytes_again =
        part * ((plan.tiles_n > 1 ? bytes_of_a_ : 0) + (plan.tiles_m > 1 ? bytes_of_b_ : 0));
    return work;
  }

  static void fill(Work& work, int64_t busy, int64_t slots) {
    work.filled = share(busy, slots);
    if (work.filled <= share(1, 2)) work.port_bytes /= 2;  // no block has a busy neighbour
  }

  // Waves of tiles, all clusters busy with whole ones, then those left over, of which `last` is the
  // work.
  void offer_phases(const Sm90Plan& plan, int64_t waves, int64_t tiles, int64_t k_blocks,
                    Work last) const {
    const int64_t left = tiles - waves * plan.clusters;
    const int64_t all = waves + (left == 0 ? 0 : 1);
    store(*plan.row, all, last);
    last.early = is_early(plan, tiles, k_blocks);
    if (waves == 0) return offer_(plan, last, nullptr);
    // The threads that load tiles go on to the next one, those that store do so themselves.
    const bool ahead = !plan.row->reads;
    last.ahead = ahead ? 1 : 0;
    last.threads -= alone_cycles(*plan.row);  // `work` has them
    Work work = work_of(plan, waves, static_cast<double>(waves * k_blocks), 1 - share(left, tiles));
    work.correction = last.correction;
    store(*plan.row, all, work);
    work.early = last.early;
    work.ahead = ahead ? static_cast<double>(waves - 1) : 0;
    if (plan.row->ping_pong) work.hidden = static_cast<double>(waves - (left == 0 ? 1 : 0));
    last.follows = true;
    offer_(plan, work, left == 0 ? nullptr : &last);
  }

  // The last, partial wave of tiles, its K split over all clusters, or, where waves are few, in
  // equal parts over as many as that takes. Parts that are not equal stand at different k, so that
  // little of what one cluster has read is still in the L2 cache for another, but what blocks
  // share: 2304 x 768 x 32768 took 1.6 times cuBLAS's time so.
  void stream(const Sm90Plan& plan, int64_t slots, int64_t k_blocks) const {
    const int64_t whole = plan.whole_tiles / slots, rest = plan.whole_tiles % slots;
    if (rest == 0) return;
    const int64_t parts = std::min(slots, rest * k_blocks / kLeastStreamBlocks);
    const int64_t even = parts / rest * rest;
    if (whole >= kSm90ManyWaves || (plan.cluster.size() > 1 && even != parts)) {
      stream_over(plan, std::max(rest, parts), slots, k_blocks);
    }
    if (whole < kSm90ManyWaves && even > rest) {
      stream_over(plan, even, whole == 0 ? even : slots, k_blocks);
    }
  }

  // `clusters` divide the k blocks of the tiles that do not fill a wave of `slots`.
  void stream_over(Sm90Plan plan, int64_t clusters, int64_t slots, int64_t k_blocks) const {
    const int64_t whole = plan.whole_tiles / slots, rest = plan.whole_tiles % slots;
    if (clusters * rest * k_blocks >= (int64_t{1} << 31)) return;
    plan.clusters = static_cast<int32_t>(slots);
    plan.stream_tiles = static_cast<int32_t>(rest);
    plan.stream_clusters = static_cast<int32_t>(clusters);
    plan.whole_tiles -= plan.stream_tiles;
    const int64_t tiles = whole * slots + rest;
    Work last =
        work_of(plan, 1, share(rest, clusters) * static_cast<double>(k_blocks), share(rest, tiles));
    last.filled = share(clusters, slots);
    last.correction += plan.streams_evenly() ? table_.of_streamed_evenly : table_.of_streamed;
    last.sums_bytes = kThroughMemory * tile_bytes(*plan.row) * share(clusters, rest);
    // Fitted when one was of a launch that set the counters to zero; of pairs, each takes two.
    last.handshakes = static_cast<double>(2 * plan.cluster.size());
    if (!plan.streams_evenly()) {
      // What clusters load that stand at different places of K stays in no cache.
      const double k_bytes = static_cast<double>(k_blocks) * 128;
      const double rows = static_cast<double>(plan.row->tile_m * plan.cluster.of_b) +
                          static_cast<double>(plan.row->tile_n * plan.cluster.of_a);
      last.bytes_again += static_cast<double>(rest) * rows * k_bytes;
    }
    offer_phases(plan, whole, tiles, k_blocks, last);
  }

  // Parts of K, each of whose sums are a matrix of their own.
  void split(Sm90Plan plan, int64_t slots, int64_t k_blocks) const {
    const bool is_tn = plan.row->is_tn();
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
      if (c_.batch_invariant && splits != c_.k_parts) continue;
      plan.splits = splits;
      plan.split_blocks = static_cast<int32_t>(blocks);
      plan.whole_tiles = static_cast<int32_t>(tiles * splits);
      plan.clusters = static_cast<int32_t>(std::min(slots, tiles * splits));
      const int64_t turns = ceil_div(tiles * splits, slots);
      Work work = work_of(plan, turns, static_cast<double>(turns * blocks));
      work.correction += of_whole_tiles_ + table_.of_splits + (is_tn ? table_.of_splits_tn : 0);
      work.bytes = bytes_of_a_ + bytes_of_b_;
      work.sums_bytes = kThroughMemory * work.tiles * tile_bytes(*plan.row);
      offer_(plan, work, nullptr);
    }
  }

  // What threads store of a share of a block's tiles, of which it has `all`: whole panels of 128
  // bytes. Where each warpgroup has tiles of its own, the last one of an odd number is stored by
  // half of the threads (H200: 3000 x 3001 x 128 by 128x192, three tiles, 13.7 us, ping-pong 19.7);
  // where both share one, 16-bit results take a quarter less.
  void store(const Sm90Row& row, int64_t all, Work& work) const {
    const int64_t size = element_size(c_.output), panel = 128 / size;
    // Those from registers are stored in pairs, where rows of C begin at one (8 of 1253 x 1253 x 64
    // of x.t() @ x with one copy, H200: 83 us, 28 predicted without; with two copies 36).
    if (c_.n * size % (row.from_registers() ? 2 * size : kVectorBytes) == 0) return;
    const int64_t columns = ceil_div(row.tile_n, panel) * panel;
    work.store_bytes = (1 - work.outside) * static_cast<double>(row.tile_m * columns * size);
    if (row.ping_pong) {
      work.store_bytes *= share(ceil_div(all, int64_t{2}) * 2, all);
    } else if (size == 2) {
      work.store_bytes *= share(3, 4);
    }
    work.store_groups = row.one_warpgroup ? 1 : 2;
  }

  const Sm90Table& table_;
  const MatmulCase& c_;
  const int64_t multiprocessors_, largest_cluster_;
  const bool swapped_;
  const double of_swapped_;
  const Sm90Offer& offer_;
  double bytes_of_a_, bytes_of_b_, bytes_of_c_;
  // Of the configs that are being counted; the last one of clusters whose tiles are not streamed.
  double outside_ = 0, of_cluster_ = 0, of_whole_tiles_ = 0;
};

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
  splits_k = fields.integer("splits_k", 0, 1) != 0;
  reads = fields.integer("reads", 0, 1) != 0;
  swaps = fields.integer("swaps", 0, 1) != 0;
  ping_pong = entry.entry().kind == "sm90_ping_pong";
  parts = entry.entry().kind == "sm90_parts";
}

Sm90Table::Sm90Table(const Device& device, const std::vector<PackageKernel*>& kernels)
    : multiprocessors(device.multiprocessors) {
  const Corrections corrections(device);
  for (PackageKernel* kernel : kernels) {
    rows.emplace_back(*kernel);
    Sm90Row& row = rows.back();
    const bool is_tn = row.is_tn();
    const std::string tile = std::to_string(row.tile_m) + "x" + std::to_string(row.tile_n);
    row.correction = corrections.of(tile) + (is_tn ? corrections.of(tile + " tn") : 0) +
                     (row.ping_pong ? corrections.of(" ping_pong") : 0);
    row.of_one_matrix =
        corrections.of(tile + (row.ping_pong ? " ping_pong" : "") + " of one matrix");
  }
  for (size_t i = 0; i < std::size(kSm90Clusters); ++i) {
    of_cluster[i] =
        corrections.of(kSm90Clusters[i].splits_k() ? " split_k" : kSm90Clusters[i].name);
  }
  of_clusters_tn = corrections.of(" clusters tn");
  of_pairs_tn = corrections.of(" split_k tn");
  of_splits = corrections.of(" splits");
  of_splits_tn = corrections.of(" splits tn");
  of_read = corrections.of(" read");
  of_streamed = corrections.of(" streamed");
  of_streamed_evenly = corrections.of(" streamed evenly");
  of_swapped = corrections.of(" swapped");
  of_one_matrix = corrections.of(" of one matrix");
}

RowsBegin rows_of_a(const MatmulCase& c, bool mn_major) {
  return rows_begin(c, c.a_lines, mn_major ? c.m : c.k);
}

RowsBegin rows_of_b(const MatmulCase& c, bool mn_major) {
  return rows_begin(c, c.b_lines, mn_major ? c.n : c.k);
}

Work sm90_work(const Sm90Tile& tile, double tiles, double k_blocks) {
  Work work;
  const double a = loaded_size(tile.m, tile.a_mn_major), b = loaded_size(tile.n, tile.b_mn_major);
  const auto m = static_cast<double>(tile.m), n = static_cast<double>(tile.n);
  work.tiles = tiles;
  work.values = tiles * m * n;
  work.multiply = k_blocks * m * n / 32;
  // What the TMA writes, and what wgmma, which computes 64 rows at a time, reads.
  work.shared = k_blocks * (a + b + m / 64 * (64 + n));
  const double k_bytes = k_blocks * 128;
  const auto loaded = [&](RowsBegin rows_begin, int64_t size, bool mn_major, double rows,
                          int64_t of) {
    return lines_of(rows_begin, size, mn_major, tile.of_gradient) * rows / static_cast<double>(of);
  };
  work.l2_bytes = k_bytes * (loaded(tile.a_rows, tile.m, tile.a_mn_major, a, tile.of_a) +
                             loaded(tile.b_rows, tile.n, tile.b_mn_major, b, tile.of_b));
  return work;
}

void sm90_configs(const Sm90Table& table, const MatmulCase& problem, int64_t largest_cluster,
                  bool swapped, const Sm90Offer& offer) {
  Counter counter(table, problem, largest_cluster, swapped, offer);
  const bool a_mn_major = !is_along_k(problem.a), b_mn_major = !is_along_k(problem.b);
  const bool reads = !is_vectors(problem.a) || !is_vectors(problem.b);
  for (const Sm90Row& row : table.rows) {
    if (reads != row.reads || (problem.row_parts && !row.adds_rows())) continue;
    if (swapped && !row.stores_transposed()) continue;
    if (row.parts && (problem.k_parts == 1 || problem.split_sums)) continue;
    // TF32 of an A that is not contiguous along K runs on portable kernels: these were compared.
    if (problem.batch_invariant && row.from_registers() && !swapped) continue;
    if (row.math == problem.math && row.a_mn_major == a_mn_major && row.b_mn_major == b_mn_major) {
      counter.count(row);
    }
  }
}

std::string sm90_name(const Sm90Plan& plan) {
  const bool reads = plan.reads_a || plan.reads_b;
  return std::to_string(plan.row->tile_m) + "x" + std::to_string(plan.row->tile_n) +
         (plan.row->ping_pong ? " ping_pong" : "") +
         (plan.transposed && plan.row->swaps ? " swapped" : "") + plan.cluster.name +
         (reads ? " read" : "") + (plan.row->parts ? " parts" : "") +
         (plan.splits > 1 ? " " + std::to_string(plan.splits) + " splits" : "") +
         (plan.stream_tiles == 0  ? ""
          : plan.streams_evenly() ? " streamed evenly"
                                  : " streamed");
}

}  // namespace torch_cubin
