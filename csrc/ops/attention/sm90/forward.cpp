// The backend of csrc/kernels/attention/sm90/forward.cu and forward_few.cu: attention forward on
// Hopper, for 16-bit types. The portable kernels serve few queries with many keys. Packed sequences
// need sm90/order.cu before it, boolean masks sm90/mask.cu, additive masks sm90/added_mask.cu.
#include <algorithm>
#include <cmath>
#include <optional>

#include "kernels/attention/sm90/mask_params.h"
#include "ops/attention/sm90/params.h"
#include "ops/attention/sm90/schedule.h"
#include "ops/common/batch_invariant.h"
#include "ops/common/launch.h"

namespace torch_cubin {
namespace {

constexpr int64_t kQueryRows = 64;  // of a box: those of a warpgroup
// The schedule counts in 32 bits, up to two rounds of two teams a block past the last tile.
constexpr int64_t kMostTiles = (int64_t{1} << 31) - 1 - 4 * kSm90MostBlocks;

constexpr AttentionStep kSm90ForwardStep{"forward", "attention/sm90/forward",
                                         sizeof(Sm90AttentionParams), true};
// Before kernels that read a mask, of the same features.
constexpr AttentionStep kSm90MaskStep{"mask", "attention/sm90/mask", sizeof(Sm90MaskParams), true};
constexpr AttentionStep kSm90AddedMaskStep{"mask", "attention/sm90/added_mask",
                                           sizeof(Sm90AddedMaskParams), true};
// Tiles are scheduled by queries instead of in pairs only if the keys and values of all heads,
// which the blocks then walk through together, take no more than this.
constexpr int64_t kByQueriesBytes = int64_t{64} << 20;
// Of a key and its value, where the TMA loads slowly: the more queries share them, the better. 32 x
// 729 rows with 16 heads of 72 took 263 us with tiles of 128 queries, and 214 with 192 (H100).
constexpr double kSlowKeyCycles = 26;
// Of the kernel before that converts a mask: one query of 128 to 1,024 keys took 3 to 4 us longer
// with a mask than its tile alone (H200).
constexpr double kMaskMicroseconds = 3;

class Sm90Forward : public AttentionForwardKernels {
 public:
  Sm90Forward(const Device& device, const AttentionEntries& entries)
      : device_(device),
        blocks_(sm90_blocks(device)),
        rows_(entries.table(kSm90ForwardStep)),
        order_(entries.kernel(kSm90OrderStep, "queries")),
        mask_(entries.kernel(kSm90MaskStep)),
        added_mask_(entries.kernel(kSm90AddedMaskStep)) {}

  ForwardPlan plan(const AttentionCase& problem) const override {
    ForwardPlan plan;
    if ((problem.has(kBoolMask) && mask_ == nullptr) ||
        (problem.has(kAnyAdded) &&
         (added_mask_ == nullptr || problem.mask_copy > kMostMaskBytes)) ||
        (problem.packed && order_ == nullptr) || !problem.has_scores()) {
      return plan;
    }
    const Sm90Band all = {problem.seqlen_q, problem.seqlen_k, -kNoBound, kNoBound};
    const AttentionRow* row = choose(problem, all, false, &plan.microseconds);
    if (problem.has(kAnyMask)) plan.microseconds += kMaskMicroseconds;
    // One kernel has to serve every number of rows: decoding and prefill then give the same bits.
    if (row != nullptr && problem.batch_invariant) plan.microseconds = 0;
    return plan;
  }

  void launch(const ForwardPlan&, const AttentionCase& problem, const FusedOperands& operands,
              float* logsumexp) const override {
    AttentionParams all = operands.params(problem.head_dim, problem.head_dim_v);
    const int64_t parts = operands.problem.parts();
    for (int64_t part = 0; part < parts; ++part) {
      operands.fill(all, part);
      const int64_t rows = int64_t{all.batch} * all.heads * all.seqlen_q;
      all.logsumexp = logsumexp == nullptr ? nullptr : logsumexp + part * rows;
      launch_part(problem, operands, all);
    }
  }

  bool clears_empty_rows() const override { return true; }

 private:
  // The quickest kernel that is wide enough; null, and an infinite time, if there is none.
  const AttentionRow* choose(const AttentionCase& problem, const Sm90Band& band, bool slow_loads,
                             double* time) const {
    *time = std::numeric_limits<double>::infinity();
    const AttentionDtype dtype = attention_dtype(problem.dtype);
    if (dtype == kAttendDtypes) return nullptr;
    const AttentionRow* best = nullptr;
    const int64_t width = std::max(problem.head_dim, problem.head_dim_v);
    // Other blocks of keys are added up in another order: batch_invariant() has one size of them.
    const bool invariant = batch_invariant();
    int64_t columns = 0;
    if (invariant) {
      rows_.for_each(dtype, problem.needs, width,
                     [&](const AttentionRow& row) { columns = std::max(columns, row.columns); });
    }
    rows_.for_each(dtype, problem.needs, width, [&](const AttentionRow& row) {
      if (invariant && row.columns != columns) return;
      // Without it the decode kernels, which divide keys among blocks, serve few queries.
      if (!invariant && row.rows < kQueryRows) return;
      const int64_t tiles = ceil_div(band.seqlen_q, row.rows) * problem.heads * problem.batch;
      const double loads = slow_loads ? kSlowKeyCycles * row.columns : 0;
      const double own =
          sm90_launch_cycles(row, band, tiles, blocks_, loads) / device_.cycles_per_microsecond;
      if (!(own < *time)) return;
      *time = own;
      best = &row;
    });
    return best;
  }

  // With a single query that sees all keys, the heads that share keys become its rows, so that keys
  // are read once. Rows are independent of each other: no bit changes.
  static bool heads_become_rows(const AttentionCase& problem, AttentionParams& all) {
    const Sm90Lengths lengths = sm90_lengths(all);
    if (problem.packed || problem.needs != kPlainCall || all.seqlen_q != 1 || all.group == 1 ||
        lengths.first > 0 || lengths.last < all.seqlen_k - 1) {
      return false;
    }
    for (tc_int64(*stride)[3] : {&all.q_stride, &all.out_stride}) {
      (*stride)[2] = (*stride)[1];
      (*stride)[1] *= all.group;
    }
    all.heads /= all.group;
    all.seqlen_q = all.total_q = all.group;
    all.group = 1;
    all.first = -kNoBound;
    all.last = kNoBound;
    return true;
  }

  void launch_part(const AttentionCase& problem, const FusedOperands& operands,
                   AttentionParams all) const {
    const bool rows_are_heads = heads_become_rows(problem, all);
    const Sm90Lengths lengths = sm90_lengths(all);
    const Sm90Band band = {all.seqlen_q, all.seqlen_k, lengths.first, lengths.last};
    double time;
    const AttentionRow& row = *choose(problem, band, loads_are_slow(all), &time);
    const bool packed = problem.packed;
    Sm90Rows rows(problem, operands);
    if (rows_are_heads) rows.q = all.seqlen_q;
    const int64_t tiles = rows.tiles(rows.q, row.rows);
    const int64_t heads = packed ? all.heads : int64_t{all.batch} * all.heads;
    if (!check_blocks(tiles * heads, kMostTiles, "tiles of output")) return;
    Sm90AttentionParams params{};
    fill_sm90_params(params, row, all, rows, kQueryRows, row.columns, device_);
    params.logsumexp = all.logsumexp;
    params.tiles = static_cast<int>(tiles);
    params.unit = static_cast<float>(all.scale * kLog2e);
    // Scores that are only multiplied by a positive number keep their order.
    params.has_rule = has_score_rule(all) || !(params.unit > 0) || !std::isnormal(params.unit);
    params.added_scale = params.has_rule ? 1.0f : static_cast<float>(all.scale);
    if (params.has_rule) params.unit = static_cast<float>(kLog2e);
    std::optional<Workspace> mask;
    if (problem.has(kBoolMask)) lay_out_mask(params, all, row, mask);
    if (problem.has(kAnyAdded)) lay_out_added_mask(params, all, row, mask);
    if (!packed) {
      if (problem.has(kPlainCall)) params.fewer = sm90_fewer_queries(row, band);
      const Sm90Heads sets(all, row, tiles, 2);
      params.schedule = mask ? sm90_heads_together(sets, device_, true)
                             : schedule(row, band, sets, loads_are_slow(all));
      torch_cubin::launch(*row.kernel, {std::min(blocks_, tiles * heads)}, device_, params);
      return;
    }
    const Sm90TileOrder order(device_, tiles);
    params.out_stride[0] = 0;
    params.order = order.data();
    order.make_of_queries(*order_, device_, row, all);
    torch_cubin::launch(*row.kernel, {std::min(blocks_, tiles * heads)}, device_, params);
  }

  // Whether some rows of keys begin within a sector of 32 bytes, which the TMA loads slowly: 8 x
  // 1024 rows with 16 heads of 72 took 1.3 times as long as of 80. Other tiles are 1 to 3% slower
  // in pairs.
  static bool loads_are_slow(const AttentionParams& all) {
    int64_t steps = 0;
    for (const tc_int64(*stride)[3] : {&all.k_stride, &all.v_stride}) {
      steps |= (*stride)[0] | (*stride)[1] | (*stride)[2];
    }
    return 2 * steps % 32 != 0;
  }

  int schedule(const AttentionRow& row, const Sm90Band& band, const Sm90Heads& heads,
               bool slow_loads) const {
    const int64_t teams = blocks_ * row.teams, tiles = heads.tiles;
    int found = sm90_tile_schedule(row, band, heads, teams, device_);
    // The scheduler can balance no more.
    if (found > 0 && teams > kSm90MostBlocks) found = kInPairs;
    if (found == kInPairs) {
      const int64_t bytes = heads.count / heads.group * heads.bytes;
      const bool idle = sm90_idle_in_pairs(heads, teams) > kSm90IdleInPairs;
      return idle && bytes <= kByQueriesBytes ? kByQueries : found;
    }
    // The second tile of a pair finds its keys in shared memory if they fill the ring.
    if (!slow_loads) return found;
    const auto fills = [&](int64_t tile) { return band.key_blocks(row, tile) == row.stages; };
    const bool same_keys = ceil_div(band.seqlen_k, row.columns) == row.stages && tiles % 2 == 0 &&
                           fills(0) && fills(tiles - 1);
    const int64_t rounds = ceil_div(tiles / 2 * heads.count, teams);
    return same_keys && 2 * rounds <= ceil_div(tiles * heads.count, teams) ? kInPairs : found;
  }

  // Bytes for a tile of queries: two bits for each block of keys, in whole words.
  static int64_t class_bytes(const Sm90MaskGrid& grid) {
    return ceil_div(grid.blocks, kMaskWordBlocks) * 4;
  }

  // Launches the kernel that converts a boolean mask for `row`'s tiles.
  void lay_out_mask(Sm90AttentionParams& out, const AttentionParams& all, const AttentionRow& row,
                    std::optional<Workspace>& memory) const {
    const Sm90MaskGrid grid(all, row.rows, row.columns);
    const int64_t line = grid.blocks * 4, classes = class_bytes(grid);  // line: words
    const int64_t lines = 1 + row.rows / kQueryRows;  // the tile's classes, its warpgroups'
    // The counter, the words, the classes.
    const int64_t words_at = 16, classes_at = words_at + grid.planes * grid.rows * line * 4;
    memory.emplace(device_, classes_at + grid.planes * grid.tiles * lines * classes);
    Sm90MaskParams params{};
    params.mask = static_cast<const unsigned char*>(all.mask);
    params.next = reinterpret_cast<int*>(memory->data());
    params.words = reinterpret_cast<unsigned*>(memory->data() + words_at);
    params.classes = reinterpret_cast<unsigned char*>(memory->data() + classes_at);
    params.classes_of_tile = static_cast<int>(classes);
    grid.fill(params, all);
    torch_cubin::launch(*mask_, {grid.grid()}, device_, params);
    out.next = params.next;
    out.mask.words = params.words;
    out.mask.classes = reinterpret_cast<const unsigned*>(params.classes);
    grid.strides(out.mask.word_stride, grid.rows, line);
    grid.strides(out.mask.class_stride, grid.tiles, lines * classes / 4);
  }

  // The same for an additive mask.
  void lay_out_added_mask(Sm90AttentionParams& out, const AttentionParams& all,
                          const AttentionRow& row, std::optional<Workspace>& memory) const {
    const Sm90MaskGrid grid(all, row.rows, row.columns);
    Sm90AddedMaskCall call(all, row.dtype, grid);
    // The counter, the classes, the copy.
    const int64_t classes = class_bytes(grid), classes_at = 16;
    const int64_t copies_at =
        classes_at + ceil_div(grid.planes * grid.tiles * classes, int64_t{16}) * 16;
    memory.emplace(device_, copies_at + call.copied_bytes());
    out.next = reinterpret_cast<int*>(memory->data());
    auto* const own = reinterpret_cast<unsigned char*>(memory->data() + classes_at);
    out.added =
        call.launch(*added_mask_, device_, out.next, own, classes, memory->data() + copies_at);
    out.mask.classes = reinterpret_cast<const unsigned*>(own);
    grid.strides(out.mask.class_stride, grid.tiles, classes / 4);
  }

  const Device& device_;
  int64_t blocks_;
  AttentionTable rows_;
  PackageKernel *order_, *mask_, *added_mask_;
};

void check_forward_row(const AttentionStep& step, const AttentionRow& row) {
  if (&step != &kSm90ForwardStep) return;
  check_16_bit(row);
  if ((row.takes & kAnyMask) != 0 && (row.rows > kMaskTileRows || row.columns > kMaskTileColumns)) {
    KernelFields(*row.kernel)
        .refuse("tile", "at most " + std::to_string(kMaskTileRows) + " queries and " +
                            std::to_string(kMaskTileColumns) + " keys");
  }
}

const AttentionBackend g_sm90_attention({&kSm90ForwardStep, &kSm90OrderStep, &kSm90MaskStep,
                                         &kSm90AddedMaskStep},
                                        &make_kernels<Sm90Forward>, &check_forward_row);

}  // namespace
}  // namespace torch_cubin
