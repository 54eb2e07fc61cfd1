#include "ops/attention/sm90/tile_scheduler.h"

#include "kernels/attention/sm90/forward_params.h"

namespace torch_cubin {
namespace {

// Balanced scheduling takes a block about 15 us for each of its tiles, in addition to its work. On
// an H200 it pays if an average tile takes this many cycles: from about 8,192 rows on.
constexpr double kWorthBalancing = 104000;
// Tiles of a head, or of several, that are computed together and share keys in the L2 cache.
constexpr int64_t kTilesTogether = 256;
// A window's tiles are scheduled by queries if all heads' keys and values take up to half of the L2
// cache, and this many blocks share a head at a time: 3% less time than round robin with 8 and 16
// blocks on an H200, and with 4 (32 heads of head_dim 64) 2 to 3% less on an H100. Round robin
// takes up to 8% less than pairs.
constexpr int64_t kWindowBytes = int64_t{24} << 20;
constexpr int64_t kBlocksOfHead = 4;

}  // namespace

int sm90_heads_together(int64_t tiles) {
  return static_cast<int>(std::max<int64_t>(1, kTilesTogether / tiles));
}

int sm90_tile_schedule(const AttentionRow& row, const Sm90Band& band, int64_t tiles, int64_t heads,
                       int64_t blocks, int64_t bytes) {
  const bool alike = band.key_blocks(row, 0) == band.key_blocks(row, tiles - 1);
  if (alike || tiles * heads <= blocks) return kRoundRobin;
  if (sm90_tile_cycles(row, band) >= kWorthBalancing) return sm90_heads_together(tiles);
  // Most tiles of a window are about as long as the longest.
  const bool is_window = band.first > -kNoBound &&
                         8 * band.key_blocks(row, tiles / 2) >= 7 * band.key_blocks(row, tiles - 1);
  if (!is_window) return kInPairs;
  const int64_t keys = band.key_blocks(row, tiles - 1) * row.columns;
  const bool together =
      heads * kBlocksOfHead <= blocks && heads * keys * row.head_dim * 2 * bytes <= kWindowBytes;
  return together ? kByQueries : kRoundRobin;
}

}  // namespace torch_cubin
