// The schedule of the tiles of a persistent kernel for Hopper on its blocks (Sm90TileSchedule), for
// sequences of equal length.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/attention/plan/backend.h"

namespace torch_cubin {

constexpr int64_t kSm90MostBlocks = 160;  // that the kernels' scheduler can balance

inline int64_t sm90_blocks(const Device& device) {
  return std::min<int64_t>(device.multiprocessors, kSm90MostBlocks);
}

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

  // For an average tile. Exact where the band's edges are straight, nearly so where lengths cut
  // them.
  double average(const AttentionRow& row) const {
    const int64_t tiles = ceil_div(seqlen_q, row.rows);
    const auto at = [&](int64_t tile) { return static_cast<double>(key_blocks(row, tile)); };
    return (at(0) + 2 * at(tiles / 2) + at(tiles - 1)) / 4;
  }
};

// Cycles of an average tile, whose blocks of keys take at least `loads` each.
inline double sm90_tile_cycles(const AttentionRow& row, const Sm90Band& band, double loads = 0) {
  return band.average(row) * std::max(row.cost_tile, loads) + row.cost_fixed;
}

// Pairs that leave this fraction of a launch idle are not worth it. For e4m3, tiles taken
// dynamically need 3% less time at 4,096 causal rows of head_dim 128, whose pairs fill 5.3 of 6
// rounds; elsewhere pairs take up to 3% less.
constexpr double kSm90IdleInPairs = 1.06;

// The blocks of a schedule in pairs, over those that are busy.
inline double sm90_idle_in_pairs(int64_t tiles, int64_t heads, int64_t blocks) {
  const int64_t pairs = ceil_div(tiles, 2) * heads;
  return static_cast<double>(ceil_div(pairs, blocks) * blocks) / static_cast<double>(pairs);
}

// A positive number for Sm90AttentionParams::schedule: heads of `tiles` each that share the L2
// cache.
int sm90_heads_together(int64_t tiles);

// Sm90AttentionParams::schedule for `tiles` of each of `heads`, on `blocks`. `bytes`: of an
// element.
int sm90_tile_schedule(const AttentionRow& row, const Sm90Band& band, int64_t tiles, int64_t heads,
                       int64_t blocks, int64_t bytes = 2);

}  // namespace torch_cubin
