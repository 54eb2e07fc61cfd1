// The configuration of an instantiation of sm90.cu, and its tile scheduler: the sequence of tiles,
// and parts of tiles, that each block computes.
#pragma once

#include "common/dtype.cuh"
#include "common/hopper.cuh"
#include "sm90_params.h"

namespace torch_cubin {
namespace sm90 {

constexpr int kMaxShared = 232448;  // bytes per block, on sm_90
// Named barriers: between the two warpgroups (their skew at the start and their order at the ends
// of tiles), and (+ warpgroup) within one warpgroup.
constexpr int kSkewBarrier = 1, kGroupBarrier = 2;

template <DType kTypeValue, bool kAMnMajorValue, bool kBMnMajorValue, int kTileMValue,
          int kTileNValue, int kStagesValue, int kConsumersValue, bool kStreamsValue,
          bool kSplitsKValue, bool kReadsValue>
struct Config {
  static constexpr DType kType = kTypeValue;  // float32: TF32 products
  static constexpr bool kAMnMajor = kAMnMajorValue, kBMnMajor = kBMnMajorValue;
  static constexpr int kTileM = kTileMValue, kTileN = kTileNValue, kStages = kStagesValue;
  static constexpr int kConsumers = kConsumersValue;
  // Optional features: streaming tiles, splitting K between the blocks of a cluster, reading
  // unaligned rows.
  static constexpr bool kStreams = kStreamsValue, kSplitsK = kSplitsKValue, kReads = kReadsValue;
  static constexpr bool kWidened = false;  // the epilogue's Widened
  static constexpr int kThreads = kWarpgroup * (1 + kConsumers);
  static constexpr int kBlocksM = kTileM / (64 * kConsumers);  // m64 blocks per warpgroup
  static constexpr int kElement = kType == DType::float32 ? 4 : 2;
  static constexpr int kTileK = 128 / kElement;
  // TF32 whose A is not K-major (sm90_registers.cuh).
  static constexpr bool kFromRegisters = kAMnMajor && kElement == 4;
  // Arrivals of a block at an empty barrier: one per warpgroup, or one per warp if warps read A.
  static constexpr int kFreeing = kFromRegisters ? 4 * kConsumers : kConsumers;
  // Whether the kernel can compute sums of A's rows (sm90_row_sums.cuh) with the registers it has
  // left.
  static constexpr bool kRowSums =
      kAMnMajor && kElement == 2 && kBlocksM * kTileN <= 256 && kConsumers <= 2;
  static constexpr int kABytes = kTileM * 128;
  static constexpr int kBBytes = (kBMnMajor ? (kTileN + 63) / 64 * 64 : kTileN) * 128;
  static constexpr int kStageBytes = kABytes + kBBytes;
  // A thread takes about 160 cycles to produce a k block, and 110 for each load of it. If the
  // tensor cores take less to multiply it, another thread, in another warp, loads B: on an H100 a k
  // block of 64 x 64 takes 285 cycles so, and 386 otherwise (H200: 290, 345); where they take more,
  // it only costs 1%. (Measured with a loop over lanes around each load: see elect_one().)
  static constexpr int kLoads = (kAMnMajor ? (kTileM + kTileK - 1) / kTileK : 1) +
                                (kBMnMajor ? (kTileN + kTileK - 1) / kTileK : 1);
  static constexpr int kProducers = (kTileM * kTileN) / 32 < 160 + 110 * kLoads ? 2 : 1;
  // One TMA store writes a panel: 16 rows of a warp, at most 128 bytes wide.
  static constexpr int kPanel = (kTileN * kElement) % 128 == 0  ? 128 / kElement
                                : (kTileN * kElement) % 64 == 0 ? 64 / kElement
                                                                : 32 / kElement;
  static constexpr int kPanelBytes = 16 * kPanel * kElement;
  static constexpr int kRing = kStages < 8 ? 8 : 16;
  static constexpr int kBiasBytes =
      kConsumers * kTileN * kElement;  // a tile's columns, per warpgroup
  static constexpr int kControlBytes = 16 * kStages + 16 + 64 * kRing + kBiasBytes;
  // Staging: 1 to 4 panels of 2048 bytes per warp, as many as fit in the remaining memory.
  static constexpr int kLeft =
      (kMaxShared - kControlBytes - kStages * kStageBytes) / (4 * kConsumers) / 2048;
  static constexpr int kWarpBytes = 2048 * (kLeft > 4 ? 4 : kLeft);
  static constexpr int kChunk = kWarpBytes >= 4096 ? 64 : 32;  // float columns that fit
  static constexpr int kBuffers = kWarpBytes / 2048;
  static constexpr int kStaging = kStages * kStageBytes;
  static constexpr int kBarriers = kStaging + 4 * kConsumers * kWarpBytes;
  static constexpr int kSharedBytes = kBarriers + kControlBytes;
  static constexpr int kBias = kSharedBytes - kBiasBytes;
  static_assert(kTileM == 64 * kConsumers * kBlocksM && kTileN % 16 == 0 && kTileN <= 256);
  static_assert(kBlocksM * kTileN <= 384, "accumulators: 192 registers at most");
  static_assert(kSharedBytes <= kMaxShared && kLeft >= 1, "shared memory of a block");
  // setmaxnreg redistributes the 3 x 168 or 4 x 128 registers that the warpgroups have at launch.
  static constexpr int kProducerRegisters = kBlocksM * kTileN > 256 ? 40 : 56;
  static constexpr int kConsumerRegisters = kConsumers == 3           ? 152
                                            : kBlocksM * kTileN > 256 ? 232
                                                                      : 224;
  // Readers need 128 registers and more for the loads in flight.
  static_assert(!kReads || (kElement == 2 && kConsumers == 1 && kTileN % 64 == 0));
};

// The arrangement of a cluster's blocks: 2^along_m x 2^along_n, with ranks consecutive along N.
struct ClusterShape {
  int along_m, along_n;

  TC_DEVICE explicit ClusterShape(int flags)
      : along_m(flags >> kSm90AlongM & 3), along_n(flags >> kSm90AlongN & 3) {}

  TC_DEVICE int log_size() const { return along_m + along_n; }
  TC_DEVICE int place_along_n(int rank) const { return rank & ((1 << along_n) - 1); }
  TC_DEVICE int place_along_m(int rank) const { return rank >> along_n & ((1 << along_m) - 1); }
  // Bit masks of the ranks that share A with this one (same_rows) and B (same_columns).
  TC_DEVICE u16 same_rows(int rank) const {
    int in_row = (1 << (1 << along_n)) - 1;
    return static_cast<u16>(in_row << (place_along_m(rank) << along_n));
  }
  TC_DEVICE u16 same_columns(int rank) const {
    int in_column = 0;
    for (int place = 0; place < 1 << along_m; ++place) in_column |= 1 << (place << along_n);
    return static_cast<u16>(in_column << place_along_n(rank));
  }
  // The number of blocks that load for one block: itself, those that share A with it, those that
  // share B.
  TC_DEVICE int sources() const { return (1 << along_m) + (1 << along_n) - 1; }
  // Their number `number` (0 is the block itself), as the XOR of its rank and the block's.
  TC_DEVICE int source(int number) const {
    int in_row = 1 << along_n;
    return number < in_row ? number : (number - in_row + 1) << along_n;
  }
};

// A work item: a stretch of K of one tile. The producer passes it to the consumers in shared
// memory, before the item's first stage arrives. It stays valid for kRing more items, since the
// producer is at most kStages items ahead of the slower consumer.
struct alignas(16) Work {
  int m0, n0;    // the block's tile
  int k_count;   // in k blocks; 0: no more work
  int streamed;  // whether other clusters have parts of this tile
  int b0, b1, b2;
  int counter;          // of warpgroup 0 of this block and tile
  int parts;            // of the tile; the last one is the finisher's
  int finisher;         // whether this part is the finisher's
  int first_part;       // in tiles of `partial`; the others except the last one follow
  int part, last_part;  // this part; the finisher's, if it did not wait
  int k_first, k_step;  // the first k block; 1, or -1 if K runs backwards
};

// log2 of the parts of K that the blocks of a cluster have, with kSm90OverK. (Other kernels never
// see that flag.)
template <class C>
TC_DEVICE int log_parts(const Sm90MatmulParams& p) {
  return C::kSplitsK ? p.flags >> kSm90AlongK & 3 : 1;
}

// The tile scheduler of a block: every `clusters`-th whole tile, then its share of the streamed
// tiles.
template <class C>
struct Schedule {
  const Sm90MatmulParams& p;
  ClusterShape shape;
  int rank, size, cluster, clusters;
  int next;         // tile, until whole_tiles
  u32 unit, units;  // remaining range of the streamed tiles' k blocks
  int k_begin;      // of the work item

  TC_DEVICE Schedule(const Sm90MatmulParams& params) : p(params), shape(params.flags) {
    int log_size = p.flags & kSm90OverK ? log_parts<C>(p) : shape.log_size();
    size = 1 << log_size;
    rank = blockIdx.x & (size - 1);
    cluster = blockIdx.x >> log_size;
    clusters = gridDim.x >> log_size;
    next = cluster;
    unit = first_unit(cluster);
    units = first_unit(cluster + 1);
  }

  // The host streams no tiles if stream_clusters * stream_tiles * k_blocks needs more than 31 bits.
  TC_DEVICE u32 all_units() const { return C::kStreams ? p.stream_tiles * p.k_blocks : 0; }
  TC_DEVICE u32 first_unit(u32 of_cluster) const {
    if (of_cluster >= p.stream_clusters) return all_units();
    return of_cluster * all_units() / p.stream_clusters;
  }
  // The cluster that computes a unit.
  TC_DEVICE int cluster_of(u32 of_unit) const {
    return ((of_unit + 1) * p.stream_clusters - 1) / all_units();
  }

  // The first k block of a part, of those that the blocks of a cluster have.
  TC_DEVICE int first_of_part(int part) const { return (part * p.k_blocks + size - 1) / size; }

  // The block's next tile, or part of one; false without one. With `last_first` from the last rows
  // to the first: in a model, the kernel before wrote those last, so that the L2 cache has them,
  // and the kernel after reads the first rows first, which are then there.
  TC_DEVICE bool get(Work& work, bool last_first = true) {
    int tile;
    work.streamed = 0;
    if (next < p.whole_tiles) {
      tile = last_first ? p.whole_tiles - 1 - next : next;
      next += clusters;
      k_begin = 0;
      work.k_count = p.k_blocks;
      if (C::kSplitsK && (p.flags & kSm90OverK)) {
        k_begin = first_of_part(rank);
        work.k_count = first_of_part(rank + 1) - k_begin;
      }
    } else if (C::kStreams && unit < units) {
      // From the end, so that parts that other clusters wait for precede parts that wait.
      int of = (units - 1) / p.k_blocks;
      u32 begin = of * p.k_blocks;
      k_begin = unit > begin ? unit - begin : 0;
      work.k_count = units - begin - k_begin;
      units = begin + k_begin;
      tile = p.whole_tiles + of;
      int first = cluster_of(begin), last = cluster_of(begin + p.k_blocks - 1);
      work.parts = last - first + 1;
      work.streamed = work.parts > 1;
      work.finisher = last == cluster;
      work.counter = (of * size + rank) * C::kConsumers;
      work.first_part = part(first, 0);
      work.last_part = part(last, 1);
      work.part = part(cluster, work.finisher);
    } else {
      return false;
    }
    place(tile, work);
    if (p.flags & kSm90SplitK) {
      k_begin = work.b0 * p.split_blocks;
      work.k_count = min(p.split_blocks, p.k_blocks - k_begin);
    }
    return true;
  }

  TC_DEVICE int part(int of_cluster, int of_finisher) const {
    return (2 * of_cluster + of_finisher) * size + rank;
  }

  // Maps a tile's number to coordinates: groups of `group` rows, column by column, with columns
  // reversed in every other group.
  TC_DEVICE void place(int tile, Work& work) const {
    work.b0 = work.b1 = work.b2 = 0;
    if (p.flags & (kSm90Batched | kSm90SplitK)) {
      int one = p.tiles_m * p.tiles_n;
      int batch = tile / one;
      tile -= batch * one;
      work.b0 = batch % p.batch[0];
      batch /= p.batch[0];
      work.b1 = batch % p.batch[1];
      work.b2 = batch / p.batch[1];
    }
    bool along_n = p.flags & kSm90GroupN;
    int rows = along_n ? p.tiles_n : p.tiles_m, columns = along_n ? p.tiles_m : p.tiles_n;
    int group = tile / (p.group * columns);
    int inside = tile - group * p.group * columns;
    int height = min(p.group, rows - group * p.group);
    int column = inside / height;
    int row = group * p.group + inside - column * height;
    if (group & 1) column = columns - 1 - column;
    int m = along_n ? column : row, n = along_n ? row : column;
    m = (m << shape.along_m) + shape.place_along_m(rank);
    n = (n << shape.along_n) + shape.place_along_n(rank);
    work.m0 = m * C::kTileM;
    work.n0 = n * C::kTileN;
  }
};

}  // namespace sm90
}  // namespace torch_cubin
