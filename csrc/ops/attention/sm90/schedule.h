// How the work of a launch for Hopper is divided among blocks: the forward's tiles
// (Sm90TileSchedule), for sequences of equal length; and in the backward the work items that share
// a tile of keys (kernels/attention/sm90/backward_parts.cuh) and the tiles of keys that share a sum
// of dq (kernels/attention/sm90/backward_dq.cuh).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/attention/sm90/forward_params.h"
#include "ops/attention/plan/plan.h"

namespace torch_cubin {

// The band of one launch, and the number of blocks of keys visible to a tile of queries.
struct Sm90Band {
  int64_t seqlen_q, seqlen_k;
  int64_t first, last;

  int64_t key_blocks(const AttentionRow& row, int64_t tile) const {
    const int64_t begin = tile * row.rows, end = std::min(begin + row.rows, seqlen_q) - 1;
    const int64_t most = std::min(seqlen_k - 1, end + last);
    const int64_t least = std::max<int64_t>(0, begin + first);
    return most < least ? 1 : most / row.columns - least / row.columns + 1;
  }

  // Those of a tile whose queries end before `end`, if the band has no first column.
  int64_t blocks_until(const AttentionRow& row, int64_t end) const {
    const int64_t most = std::min(seqlen_k, end + last) - 1;
    return most < 0 ? 1 : most / row.columns + 1;
  }

  // For an average tile, and for the longest. Exact where the band's edges are straight, nearly so
  // where lengths cut them.
  double average(const AttentionRow& row) const {
    const auto [begin, middle, end] = some_tiles(row);
    return (begin + 2 * middle + end) / 4;
  }
  double longest(const AttentionRow& row) const {
    const auto [begin, middle, end] = some_tiles(row);
    return std::max({begin, middle, end});
  }

 private:
  std::array<double, 3> some_tiles(const AttentionRow& row) const {
    const int64_t tiles = ceil_div(seqlen_q, row.rows);
    const auto at = [&](int64_t tile) { return static_cast<double>(key_blocks(row, tile)); };
    return {at(0), at(tiles / 2), at(tiles - 1)};
  }
};

// Cycles of an average tile, whose blocks of keys take at least `loads` each.
inline double sm90_tile_cycles(const AttentionRow& row, const Sm90Band& band, double loads = 0) {
  return band.average(row) * std::max(row.cost_tile, loads) + row.cost_fixed;
}

// Cycles of a launch of so many tiles, of which `blocks` multiprocessors compute one a team at a
// time. Without the longest tile, two teams were chosen for causal calls whose tiles all run at a
// time, of which one multiprocessor has the longest and most have little to do.
inline double sm90_launch_cycles(const AttentionRow& row, const Sm90Band& band, int64_t tiles,
                                 int64_t blocks, double loads = 0) {
  const auto rounds = static_cast<double>(ceil_div(tiles, blocks * row.teams));
  const double longest = band.longest(row) * std::max(row.cost_tile, loads) + row.cost_fixed;
  return std::max(rounds * sm90_tile_cycles(row, band, loads), longest);
}

// Pairs that leave this fraction of a launch idle are not worth it. For e4m3, tiles taken
// dynamically need 3% less time at 4,096 causal rows of head_dim 128, whose pairs fill 5.3 of 6
// rounds; elsewhere pairs take up to 3% less.
constexpr double kSm90IdleInPairs = 1.06;

// The smallest size of sets of `heads`, from `least` to `most`, with which the last set is nearly
// full. The longest tiles of a set come first, so that a small last one would run alone: of
// 14 heads of 8,192 causal rows, sets of 4 took 1.12 times as long as of 7 (H200).
int64_t sm90_size_of_sets(int64_t heads, int64_t least, int64_t most);

// The heads of queries of a launch, in all sequences.
struct Sm90Heads {
  int64_t count;
  int64_t tiles;  // of each
  int64_t group;  // that share keys and values
  int64_t bytes;  // of these

  Sm90Heads(const AttentionParams& all, const AttentionRow& row, int64_t tiles_, int64_t element)
      : count(int64_t{all.batch} * all.heads),
        tiles(tiles_),
        group(all.group),
        bytes(2 * all.seqlen_k * row.head_dim * element) {}
};

// The blocks of a schedule in pairs, over those that are busy.
inline double sm90_idle_in_pairs(const Sm90Heads& heads, int64_t blocks) {
  const int64_t pairs = ceil_div(heads.tiles, 2) * heads.count;
  return static_cast<double>(ceil_div(pairs, blocks) * blocks) / static_cast<double>(pairs);
}

// A positive number for Sm90AttentionParams::schedule: how many heads share the L2 cache. `taken`:
// blocks take one tile after the other, from a counter; otherwise by a balanced list.
int sm90_heads_together(const Sm90Heads& heads, const Device& device, bool taken);

// Sm90AttentionParams::fewer of a call without a mask and ALiBi: the queries that tiles have too
// many. Under a causal mask the last tile sees the most keys, so a partial one costs less in front:
// of 4,096 rows, tiles of 192 queries compute 363 blocks of 128 keys for 384.
int sm90_fewer_queries(const AttentionRow& row, const Sm90Band& band);

// Sm90AttentionParams::schedule on `blocks`.
int sm90_tile_schedule(const AttentionRow& row, const Sm90Band& band, const Sm90Heads& heads,
                       int64_t blocks, const Device& device);

// `heads`: of keys, in all sequences; 0: one part. `slots`: work items that run at a time.
struct Sm90KeyWork {
  int64_t heads, group, slots;
  int64_t seqlen_q, seqlen_k;    // of a sequence, the average if they are packed
  int64_t longest_q, longest_k;  // of the longest sequence
  int64_t first, last;           // the band, see Sm90Lengths
};

struct Sm90KeyShares {
  int64_t parts = 1;  // of a tile of keys
  int64_t sets = 1;   // of the tiles of keys
};

// Blocks that share a work item's keys in the backward: two in a cluster, each with half of them.
inline int64_t sm90_blocks_of_work(const AttentionRow& row) {
  return row.kernel->entry().cluster[0];
}
// Work items of a pair along the keys: its blocks count their turns in 16 bits.
constexpr int64_t kSm90MostPairs = 65535;

// The heads of keys whose blocks run concurrently, of `kv_heads` in all sequences.
int64_t sm90_heads_together(const AttentionCase& problem, const AttentionRow& row, int64_t kv_heads,
                            int64_t parts, bool has_band, const Device& device);

// The blocks of the kernel that rounds dq, a piece a warp. `rounds`: most is rounded before, and a
// warp takes one remaining piece after the other.
int64_t sm90_convert_blocks(const PackageKernel& kernel, int64_t warps, bool rounds,
                            const Device& device);

// The numbers that take the least time. One part is enough if all multiprocessors are busy with it.
Sm90KeyShares sm90_key_shares(const Sm90KeyWork& work, const AttentionRow& row,
                              const Device& device);

}  // namespace torch_cubin
