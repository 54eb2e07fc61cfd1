// The tile scheduler of products of groups: which tile a block computes next, from ends of groups
// that only the device knows.
#pragma once

#include "common/ptx.cuh"
#include "groups_params.h"

namespace torch_cubin {

// A work item: one tile. The producer passes it to the consumers in shared memory, before the
// item's first stage arrives. An item without k blocks takes one empty stage.
struct alignas(16) GroupedWork {
  int m0, m_end;  // rows of the output (in contraction of the group's): the tile's first, the end
  int n0;
  int group;     // of B and of the output
  int k0;        // first k
  int k_blocks;  // 0: nothing to add
  int k_tail;    // columns of K in the last block that are the group's; 64: all
  int kind;
};

// kWorkHalf: a kWorkTile of half the height.
enum GroupedWorkKind { kWorkEnd, kWorkTile, kWorkNaN, kWorkHalf };

// Executed by all lanes of a warp, which hold 32 consecutive groups at a time. Blocks take tiles in
// ascending order, so each warp reads the ends once. Params has the fields of groups of
// sm90_grouped_params.h.
//
// kHalfTiles: of up to 31 groups, the tiles of the last round are halved if half of the blocks
// would have none, for kernels where tiles of half the height take half of the time.
template <class Params, bool kContraction, int kTileM, bool kHalfTiles = false>
class GroupedSchedule {
 public:
  TC_DEVICE explicit GroupedSchedule(const Params& params) : p_(params) {
    const int pair = p_.flags & kGroupedPair ? 1 : 0;
    pair_ = pair;
    rank_ = blockIdx.x & pair;
    clusters_ = gridDim.x >> pair;
    tile_ = static_cast<int>(blockIdx.x >> pair);
  }

  // After wait_for_previous_grid(). False after the last tile.
  TC_DEVICE bool next(GroupedWork& work) {
    while (tile_ >= first_ + total_) {
      if (first_group_ >= p_.groups + kRest) return false;
      first_ += total_;
      read_groups();
      first_group_ += 32;
    }
    const int half = kHalfTiles ? max(tile_ - whole_, 0) : 0;  // of those halved, the number
    const int tile = kHalfTiles ? tile_ - (half + 1) / 2 : tile_;
    // The last lane whose tiles begin at or before this one; lanes without tiles precede it.
    const unsigned before = __ballot_sync(~0u, first_ + own_first_ <= tile);
    const int lane = 31 - __clz(static_cast<int>(before));
    const int start = __shfl_sync(~0u, start_, lane), end = __shfl_sync(~0u, end_, lane);
    const int kind = __shfl_sync(~0u, kind_, lane);
    const int inside = tile - first_ - __shfl_sync(~0u, own_first_, lane);
    const int group = first_group_ - 32 + lane;
    const int rows = kContraction ? p_.m : end - start;
    place(inside, tiles_m(rows), work);
    work.m0 += kContraction ? 0 : start;
    work.m_end = kContraction ? p_.m : end;
    work.group = group;
    work.kind = kind;
    work.k0 = kContraction ? start : 0;
    const bool adds = kind == kWorkTile && group < p_.groups;
    const int k = kContraction ? end - start : 0;
    work.k_blocks = !adds ? 0 : kContraction ? (k + 63) / 64 : p_.k_blocks;
    work.k_tail = kContraction && k % 64 != 0 ? k % 64 : 64;
    if constexpr (kHalfTiles) {
      if (tile_ >= whole_) {
        work.m0 += half % 2 * (kTileM / 2);
        work.m_end = min(work.m_end, work.m0 + kTileM / 2);
        if (work.k_blocks > 0) work.kind = kWorkHalf;
      }
    }
    tile_ += clusters_;
    return true;
  }

 private:
  // The rows past the last end are one more group, whose sums are zero.
  static constexpr int kRest = kContraction ? 0 : 1;

  TC_DEVICE int tiles_m(int rows) const {
    const int height = kTileM << pair_;
    return (rows + height - 1) / height;
  }

  // A number that is no valid end becomes -1.
  TC_DEVICE int read_end(int group) const {
    if (p_.flags & kGroupedWideEnds) {
      const tc_int64 end = static_cast<const tc_int64*>(p_.ends)[group];
      return end < 0 || end > p_.limit ? -1 : static_cast<int>(end);
    }
    const int end = static_cast<const int*>(p_.ends)[group];
    return end < 0 || end > p_.limit ? -1 : end;
  }

  // Gives each lane its group from first_group_ on, and that group's tiles.
  TC_DEVICE void read_groups() {
    const int lane = threadIdx.x % 32, group = first_group_ + lane;
    end_ = group < p_.groups ? read_end(group) : p_.limit;
    const int before = __shfl_up_sync(~0u, end_, 1);
    start_ = lane == 0 ? last_end_ : before;
    const unsigned wrong = __ballot_sync(~0u, end_ < start_);
    const bool follows_wrong = wrong_ || (wrong & ((1u << lane) - 1)) != 0;
    const bool is_wrong = follows_wrong || end_ < start_;
    wrong_ = wrong_ || wrong != 0;
    last_end_ = __shfl_sync(~0u, end_, 31);

    kind_ = is_wrong ? kWorkNaN : kWorkTile;
    if (is_wrong) end_ = p_.limit;
    int tiles;
    if constexpr (kContraction) {
      tiles = group < p_.groups ? tiles_m(p_.m) * p_.tiles_n : 0;
    } else {
      const bool exists =
          group < p_.groups || (group == p_.groups && (p_.flags & kGroupedZeroRest) != 0);
      tiles = exists && !follows_wrong ? tiles_m(end_ - start_) * p_.tiles_n : 0;
    }
    int sum = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    own_first_ = sum - tiles;
    total_ = __shfl_sync(~0u, sum, 31);
    if constexpr (kHalfTiles) {
      const int rest = total_ % clusters_;
      if (p_.groups + kRest <= 32 && 2 * rest <= clusters_) {  // else these are not all groups
        whole_ = total_ - rest;
        total_ += rest;
      }
    }
  }

  // `raster` rows of tiles follow one another, column by column, so that blocks that run together
  // share rows of A and columns of B in the L2 cache.
  TC_DEVICE void place(int tile, int tiles_m, GroupedWork& work) const {
    const int band = tile / (p_.raster * p_.tiles_n);
    const int inside = tile - band * p_.raster * p_.tiles_n;
    const int height = min(p_.raster, tiles_m - band * p_.raster);
    int column = inside / height;
    const int row = band * p_.raster + inside - column * height;
    if (band & 1) column = p_.tiles_n - 1 - column;
    work.m0 = ((row << pair_) + rank_) * kTileM;
    work.n0 = column * p_.tile_columns;
  }

  const Params& p_;
  int pair_, rank_, clusters_, tile_;
  int first_group_ = 0;        // after those that the lanes hold
  int first_ = 0, total_ = 0;  // tile of the first lane's group; the lanes' tiles
  int last_end_ = 0;
  bool wrong_ = false;                                  // whether an end so far was wrong
  int start_ = 0, end_ = 0, own_first_ = 0, kind_ = 0;  // of the lane's group
  int whole_ = 0x7fffffff;                              // where tiles begin that are halved
};

}  // namespace torch_cubin
