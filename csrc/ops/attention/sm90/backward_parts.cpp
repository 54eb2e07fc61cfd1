#include "ops/attention/sm90/backward_parts.h"

#include <algorithm>
#include <cmath>

namespace torch_cubin {
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
