#include "ops/attention/plan.h"

#include <algorithm>
#include <cmath>

#include "cubin/error.h"

namespace torch_cubin {
namespace {

constexpr int64_t kMostSplits = 128;
constexpr int64_t kFewestColumns = 256;  // of a split
// Decoding, measured on the H200: two blocks a multiprocessor saturate the memory.
constexpr int64_t kDecodeBlocks = 2;
constexpr int64_t kDecodeQueries = 16;
constexpr int64_t kDecodeRows = 64;  // past that, tiles of more rows read keys less often

// Cycles until the last of `blocks` is done.
double cycles(const AttentionTable::Row& row, int64_t blocks, int64_t columns) {
  const double waves = static_cast<double>(ceil_div(blocks, row.slots));
  return waves *
         (static_cast<double>(ceil_div(columns, row.columns)) * row.cost_tile + row.cost_fixed);
}

// Splits the columns so that plan.blocks of `batch` fill the device's `slots` once, but no finer
// than is worth a second kernel.
void split(AttentionPlan& plan, const AttentionTable& table, AttentionDtype dtype,
           const AttentionTable::Row& row, const AttentionShape& shape, int64_t batch,
           int64_t slots) {
  const int64_t blocks = plan.blocks * batch;
  plan.columns_per_split = shape.seqlen_k;
  // The lengths of packed sequences are not known here.
  if (table.combine[dtype].empty() || blocks == 0 || shape.packed) return;
  const int64_t tiles = ceil_div(shape.seqlen_k, row.columns);
  const int64_t fewest = std::max<int64_t>(1, kFewestColumns / row.columns);
  const int64_t wanted = std::min({slots / blocks, tiles / fewest, kMostSplits});
  if (wanted <= 1) return;
  const int64_t tiles_per_split = ceil_div(tiles, wanted);
  plan.columns_per_split = tiles_per_split * row.columns;
  plan.splits = static_cast<int>(ceil_div(tiles, tiles_per_split));
  plan.combine = table.combine[dtype][0].kernel;
}

// The kernel for few queries, if these are few: it reads keys and values once for all heads of a
// group, and has one variant, the general one.
const AttentionTable::Row* decode_row(const AttentionTable& table, AttentionDtype dtype,
                                      const AttentionShape& shape, int64_t head_dim) {
  if (shape.seqlen_q > kDecodeQueries || shape.seqlen_q * shape.group() > kDecodeRows) {
    return nullptr;
  }
  return narrowest(table.decode[dtype][kGeneral], head_dim);
}

}  // namespace

AttentionVariant attention_variant(const AttentionSettings& settings,
                                   const AttentionOptions& options) {
  // A scale that is not positive turns the order of the scores around, which only the general
  // kernels expect. The full ones multiply hidden scores, -inf, with scale * log2(e) as a float,
  // where a positive double can become 0 or inf.
  const auto unit = static_cast<float>(settings.scale * 1.4426950408889634);
  const bool general = options.attn_mask || options.alibi_slopes || options.sinks ||
                       settings.drop_below > 0 || settings.softcap > 0 || !(unit > 0) ||
                       !std::isnormal(unit);
  return general ? kGeneral : kFull;
}

const AttentionTable::Row* narrowest(const std::vector<AttentionTable::Row>& rows,
                                     int64_t head_dim) {
  const AttentionTable::Row* best = nullptr;
  for (const AttentionTable::Row& row : rows) {
    if (row.head_dim >= head_dim && (best == nullptr || row.head_dim < best->head_dim)) best = &row;
  }
  return best;
}

AttentionPlan plan_forward(const AttentionTable& table, AttentionDtype dtype,
                           AttentionVariant variant, const AttentionShape& shape, int64_t head_dim,
                           int64_t batch) {
  AttentionPlan plan;
  if (const AttentionTable::Row* row = decode_row(table, dtype, shape, head_dim)) {
    plan.kernel = row->kernel;
    plan.blocks = ceil_div(shape.seqlen_q * shape.group(), row->rows) * shape.kv_heads;
    split(plan, table, dtype, *row, shape, batch, kDecodeBlocks * table.multiprocessors);
    return plan;
  }
  const AttentionTable::Row* fits = narrowest(table.forward[dtype][variant], head_dim);
  if (fits == nullptr) return plan;
  double best = 0;
  const AttentionTable::Row* chosen = nullptr;
  for (const AttentionTable::Row& row : table.forward[dtype][variant]) {
    if (row.head_dim != fits->head_dim) continue;
    const int64_t blocks = ceil_div(shape.seqlen_q, row.rows) * shape.heads;
    const double cost = cycles(row, blocks * batch, shape.seqlen_k);
    if (chosen != nullptr && cost >= best) continue;
    best = cost;
    chosen = &row;
    plan.blocks = blocks;
  }
  plan.kernel = chosen->kernel;
  split(plan, table, dtype, *chosen, shape, batch, chosen->slots);
  return plan;
}

void launch_attention(CatalogKernel& kernel, const AttentionParams& params, int64_t blocks,
                      int splits, const Device& device) {
  if (blocks == 0) return;  // cu_seqlens of no sequence
  if (blocks > kMaxGrid[0]) {
    fail({"input", "this attention", "is too large for one launch",
          "at most " + std::to_string(kMaxGrid[0]) + " tiles of output", std::to_string(blocks),
          "Compute it in parts."});
  }
  kernel.launch(blocks, splits, device, &params);
}

}  // namespace torch_cubin
