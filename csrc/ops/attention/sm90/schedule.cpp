#include "ops/attention/sm90/schedule.h"

#include <cmath>

#include "ops/common/batch_invariant.h"

namespace torch_cubin {
namespace {

// Balanced lists pay if an average tile takes this many cycles: from 4,096 rows on, from 2,048 with
// 256 columns; shorter tiles gain nothing (H200). For windows, most of whose tiles are alike, they
// were measured with longer tiles alone.
constexpr double kWorthBalancing = 45000, kWorthBalancingWindows = 104000;
// Of blocks of keys that each block computes, the scheduler counts about twice as many in 31 bits.
constexpr double kMostKeyBlocks = 1 << 20;
// Tiles of a head, or of several, that are computed together and share keys in the L2 cache.
constexpr int64_t kTilesTogether = 384;
// Blocks of a balanced list that walk through a head's keys at the same time, so that they need not
// stay in the cache: with 84 MB in sets of 20 heads such a list took 0.85 of the time of pairs
// (H200).
constexpr int64_t kBlocksThatShare = 6;
// Of the L2 cache, what the heads of a set take whose tiles are taken one by one. In sets of 32 and
// 22 heads, of 67 and 46 MB, padding as a mask took 1.16 and 1.07 of the time of 16 (H200, 60 MB).
constexpr int64_t kCacheParts = 8, kCachePartsOfSet = 5;
// A window's tiles are scheduled by queries if all heads' keys and values take up to half of the L2
// cache, and this many blocks share a head at a time: 3% less time than round robin with 8 and 16
// blocks on an H200, and with 4 (32 heads of head_dim 64) 2 to 3% less on an H100. Round robin
// takes up to 8% less than pairs.
constexpr int64_t kWindowBytes = int64_t{24} << 20;
constexpr int64_t kBlocksOfHead = 4;
// Of so many tiles the partial one is less than 1% of the time wherever it is.
constexpr int64_t kMostTilesMoved = 256;

}  // namespace

int64_t sm90_size_of_sets(int64_t heads, int64_t least, int64_t most) {
  int64_t best = std::min(heads, least), fewest = heads;
  for (int64_t size = best; size <= std::min(heads, most); ++size) {
    const int64_t missing = ceil_div(heads, size) * size - heads;
    if (missing >= fewest) continue;
    best = size;
    fewest = missing;
    if (missing * 16 <= heads) break;
  }
  return best;
}

int sm90_heads_together(const Sm90Heads& heads, const Device& device, bool taken) {
  const int64_t wanted = std::max<int64_t>(1, kTilesTogether / heads.tiles);
  // The fewest sets whose keys and values fit in the cache, in equal parts.
  const int64_t bytes = taken ? device.l2_bytes / kCacheParts * kCachePartsOfSet : device.l2_bytes;
  const int64_t shared = taken ? 1 : device.multiprocessors / kBlocksThatShare;
  const int64_t fitting =
      std::max({bytes * heads.group / std::max<int64_t>(1, heads.bytes), shared, int64_t{1}});
  const int64_t equal = ceil_div(heads.count, ceil_div(heads.count, fitting));
  return static_cast<int>(
      sm90_size_of_sets(heads.count, std::min(wanted, equal), std::min(2 * wanted, fitting)));
}

int sm90_fewer_queries(const AttentionRow& row, const Sm90Band& band) {
  const int64_t tiles = ceil_div(band.seqlen_q, row.rows);
  const int64_t fewer = tiles * row.rows - band.seqlen_q;
  const bool grows = band.first == -kNoBound && band.last != kNoBound;
  if (fewer == 0 || !grows || tiles > kMostTilesMoved || batch_invariant()) return 0;
  int64_t in_front = 0, at_end = 0;  // blocks of keys
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t end = (tile + 1) * row.rows;
    in_front += band.blocks_until(row, end - fewer);
    at_end += band.blocks_until(row, std::min(end, band.seqlen_q));
  }
  return (at_end - in_front) * 100 >= at_end ? static_cast<int>(fewer) : 0;
}

int sm90_tile_schedule(const AttentionRow& row, const Sm90Band& band, const Sm90Heads& heads,
                       int64_t blocks, const Device& device) {
  const int64_t tiles = heads.tiles;
  const bool alike = band.key_blocks(row, 0) == band.key_blocks(row, tiles - 1);
  if (alike || tiles * heads.count <= blocks) return kRoundRobin;
  // Most tiles of a window are about as long as the longest.
  const bool is_window = band.first > -kNoBound &&
                         8 * band.key_blocks(row, tiles / 2) >= 7 * band.key_blocks(row, tiles - 1);
  const double work = (band.average(row) + 1) * tiles * heads.count / blocks;
  const double least = is_window ? kWorthBalancingWindows : kWorthBalancing;
  if (sm90_tile_cycles(row, band) >= least && work < kMostKeyBlocks) {
    return sm90_heads_together(heads, device, false);
  }
  if (!is_window) return kInPairs;
  const int64_t keys = band.key_blocks(row, tiles - 1) * row.columns;
  const bool together = heads.count * kBlocksOfHead <= blocks &&
                        heads.count * keys * (heads.bytes / band.seqlen_k) <= kWindowBytes;
  return together ? kByQueries : kRoundRobin;
}

namespace {

constexpr int64_t kMostParts = 16;
constexpr int64_t kMostSets = 8;  // each takes as much memory as dq in float32
// With so many work items a slot, the last ones to end are short beside the time of all.
constexpr int64_t kEnoughItems = 8;
// Cycles from a block's addition to dq to that of the next block. All tiles of keys begin with the
// same queries, so that the last one begins after as many turns; of this 0.6 is left if other work
// items follow. Of equal ones, that is: of a causal mask, the last tiles have the fewest steps.
// Measured on an H100 (1 x 4096, 8/1 heads of 64; 1, 2, 4, 8 and 16 parts: 665, 375, 240, 217, 223
// us).
constexpr double kTurnCycles = 4200, kHiddenTurns = 0.6;
// Of the time, that more parts must save.
constexpr double kLeastGain = 0.03;

// Steps of a head of keys of a sequence: of the tile of keys with the most, and of all tiles.
struct Steps {
  int64_t longest = 0, all = 0;

  Steps(const Sm90KeyWork& work, const AttentionRow& row, int64_t seqlen_q, int64_t seqlen_k) {
    for (int64_t key = 0; key < seqlen_k; key += row.columns) {
      const int64_t begin = std::max<int64_t>(0, key - work.last) / row.rows;
      const int64_t end =
          ceil_div(std::clamp<int64_t>(key + row.columns - work.first, 0, seqlen_q), row.rows);
      const int64_t own = std::max<int64_t>(0, end - begin) * work.group;
      longest = std::max(longest, own);
      all += own;
    }
  }
};

}  // namespace

Sm90KeyShares sm90_key_shares(const Sm90KeyWork& work, const AttentionRow& row,
                              const Device& device) {
  const int64_t key_tiles = ceil_div(work.seqlen_k, row.columns), tiles = key_tiles * work.heads;
  Sm90KeyShares best;
  if (tiles == 0 || tiles >= kEnoughItems * work.slots) return best;
  const Steps steps(work, row, work.seqlen_q, work.seqlen_k);
  const Steps most(work, row, work.longest_q, work.longest_k);
  const bool alike = steps.longest * key_tiles == steps.all && most.longest == steps.longest;
  // Of packed sequences the sum of the lengths and the longest are known. Between those of equal
  // sequences and those of as many of the longest as fit: the geometric mean.
  const double sequences = static_cast<double>(work.seqlen_k) / work.longest_k;  // of the longest
  const double all_steps = work.heads * std::sqrt(steps.all * (sequences * most.all));
  const double bytes = 2.0 * row.columns * row.head_dim * 2 * sizeof(float);  // written and read
  const double dq_bytes =
      static_cast<double>(work.heads) * work.group * work.seqlen_q * row.head_dim * sizeof(float);
  double least = 0;
  for (int64_t sets = 1; sets <= std::min(kMostSets, alike ? key_tiles : 1); sets *= 2) {
    for (int64_t parts = 1; parts <= std::min(kMostParts, most.longest); ++parts) {
      const int64_t items = tiles * parts;
      const double longest = ceil_div(most.longest, parts) * row.cost_tile + row.cost_fixed;
      const double all = all_steps * row.cost_tile + items * row.cost_fixed;
      const double turns = (ceil_div(key_tiles, sets) - 1) * kTurnCycles;
      double cycles = alike ? ceil_div(items, work.slots) * longest +
                                  turns * (items <= work.slots ? 1 : kHiddenTurns)
                            : std::max(longest, all / work.slots + all / items / 8);
      if (parts > 1) cycles += items * bytes / device.bytes_per_cycle;
      cycles += (sets - 1) * dq_bytes / device.bytes_per_cycle;
      if (sets * parts > 1 && cycles >= least * (1 - kLeastGain)) continue;
      least = cycles;
      best = {parts, ceil_div(key_tiles, ceil_div(key_tiles, sets))};
    }
  }
  return best;
}

}  // namespace torch_cubin
