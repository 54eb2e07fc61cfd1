#include "ops/attention/portable/portable.h"

#include <algorithm>

namespace torch_cubin {
namespace {

// Each costs a block 0.15 us of requests. Measured, 2 are best for a kernel alone on its
// multiprocessors; more blocks keep the memory busy without prefetching.
constexpr int kPrefetchedTiles = 2;

}  // namespace

CombineGrid::CombineGrid(const AttentionRow& combine, int64_t splits, int64_t rows,
                         int64_t head_dim_v, bool one_order) {
  while (warps_per_row < combine.rows && (one_order || splits > warps_per_row * kPartsTogether)) {
    warps_per_row *= 2;
  }
  blocks = ceil_div(rows, combine.rows / warps_per_row);
  blocks_per_row = static_cast<int>(
      std::max<int64_t>(1, ceil_div(head_dim_v, static_cast<int64_t>(kCombinedColumns))));
}

void launch_combine(const AttentionRow& combine, const AttentionParams& params, int64_t rows,
                    bool one_order, const Device& device) {
  const CombineGrid grid(combine, params.splits, rows, params.head_dim_v, one_order);
  CombineParams p{};
  static_cast<AttentionParams&>(p) = params;
  p.warps_per_row = grid.warps_per_row;
  launch_attention(*combine.kernel, p, grid.blocks, grid.blocks_per_row, device);
}

DecodeSplit split_decode(const AttentionRow& decode, int64_t blocks, int64_t most,
                         const Device& device) {
  DecodeSplit best;
  const int64_t multiprocessors = device.multiprocessors;
  // All in one wave; combining parts takes time.
  const int64_t fewest =
      std::max<int64_t>(1, ceil_div(9 * decode.saturating * multiprocessors, 10 * blocks));
  double best_score = -1;
  for (int64_t parts = fewest; parts <= std::min(2 * fewest, most); ++parts) {
    const int64_t all = blocks * parts;
    if (all > decode.slots) break;
    const int64_t full = ceil_div(all, multiprocessors) * multiprocessors;
    const double score = static_cast<double>(all) / static_cast<double>(full) -
                         0.01 * static_cast<double>(parts - fewest);
    if (score <= best_score) continue;
    best_score = score;
    best.parts = parts;
  }
  if (best_score < 0 && blocks < decode.slots) {
    best.parts = std::max<int64_t>(1, std::min({fewest, most, decode.slots / blocks}));
  }
  // Blocks of the previous kernel may still occupy some multiprocessors when these are scheduled,
  // and the others would get more than their share.
  const int64_t each = ceil_div(blocks * best.parts, multiprocessors);
  const double share = each == 1 ? 0.52 : each == 2 ? 0.375 : each == 3 ? 0.29 : 0;
  const auto shared = static_cast<int64_t>(share * device.shared_optin) / 1024 * 1024;
  if (shared > decode.dynamic_shared) best.dynamic_shared = shared;
  if (each == 1) best.prefetched = kPrefetchedTiles;
  return best;
}

const AttentionRow* decode_row(const AttentionTable& rows, AttentionDtype dtype, unsigned needs,
                               int64_t head_dim, int64_t blocks, const Device& device) {
  const int64_t busy = device.multiprocessors / std::max<int64_t>(1, blocks) * blocks;
  const bool fills = 10 * busy >= 9 * device.multiprocessors;
  const AttentionRow* best = nullptr;
  rows.for_each(dtype, needs, head_dim, [&](const AttentionRow& row) {
    // Of equal ones the first, as the manifest lists them.
    const bool better =
        best == nullptr || (fills ? row.columns > best->columns : row.columns < best->columns);
    if (better) best = &row;
  });
  return best;
}

}  // namespace torch_cubin
