// The backend of the backward for Hopper, for 16-bit types. Three kernels in sequence, with one
// parameter: sm90/backward_delta.cu, sm90/backward.cu (heads of up to 128 columns) or
// sm90/backward_wide.cu (up to 256), and sm90/backward_convert.cu. For packed sequences they follow
// sm90/order.cu, for boolean masks sm90/backward_mask.cu, for additive masks
// sm90/backward_added_mask.cu. The portable kernels serve all other calls.
#include <algorithm>
#include <optional>

#include "kernels/attention/sm90/backward_params.h"
#include "ops/attention/sm90/params.h"
#include "ops/attention/sm90/schedule.h"
#include "ops/common/cluster_capacity.h"
#include "ops/common/launch.h"

namespace torch_cubin {
namespace {

// Blocks with the same keys run concurrently for as many heads as read and add to about an L2 cache
// of data, 8 bytes a column of each query. Heads side by side are better than keys side by side,
// since blocks of one head wait for each other's additions to dq. Long heads are stepped through in
// parallel, so that a part of them suffices: the more so the shorter a band makes the path, and the
// more heads the fewer keys a block has, since more blocks of a head then wait. Measured on an H200
// with its cache of 60 MB and, for smaller ones, on an H100 with 50 MB.
constexpr int64_t kBytesTogether = int64_t{32} << 20, kFewBytesTogether = int64_t{20} << 20;
constexpr int64_t kLongHeadBytes = int64_t{2} << 20, kLeastTogether = 4;
constexpr int64_t kLargeCache = int64_t{56} << 20;

bool has_small_cache(const Device& device) { return device.l2_bytes < kLargeCache; }

// Single blocks of wide heads add twice as much: a small cache must hold all of their data.
bool fills_cache(const AttentionRow& row, const Device& device) {
  return has_small_cache(device) && row.head_dim > 128 && sm90_blocks_of_work(row) == 1;
}

// `head`: bytes of one. `has_mask`: a boolean one.
int64_t bytes_together(const AttentionRow& row, int64_t head, bool has_band, bool has_mask,
                       const Device& device) {
  const bool in_pairs = sm90_blocks_of_work(row) > 1;
  const bool is_long = in_pairs ? head > kLongHeadBytes : head >= kLongHeadBytes;
  // All of a short head is in use at a time, so that a few heads fill a small cache. Pairs without
  // a band were quickest with few heads at every length: of 512 to 16,384 rows with 16, 8, 8, 4, 4
  // and 2 to 4 (H100, 2026-11-25); with a band from 1 MB a head on they gain by more, 24, 16, 16,
  // 8, 10 and 8. With a boolean mask, which may also be a band, 8 heads of 2048 rows instead of 5
  // took 0.92 of the time when it was causal, 0.97 for documents, 1.00 for lengths and 1.05 when it
  // hid nothing (H100, 2026-11-26).
  const bool is_short = has_band ? head < kLongHeadBytes / 2 : !is_long || (in_pairs && !has_mask);
  if (is_short && (in_pairs || has_small_cache(device))) return kFewBytesTogether;
  return has_band && is_long && !fills_cache(row, device) ? 2 * kBytesTogether : kBytesTogether;
}

// At least as many as have a block for every multiprocessor: the next set's longest blocks come
// after this one's shortest, and a device that is full of one set never waits for them.
int64_t heads_together(const AttentionCase& problem, const AttentionRow& row, int64_t parts,
                       bool has_band, const Device& device) {
  const int64_t head = problem.seqlen_q * row.head_dim * 8, each = head * problem.group();
  const int64_t keys = row.columns / sm90_blocks_of_work(row);
  int64_t least = has_band ? kLeastTogether * 128 / keys : kLeastTogether;
  if (fills_cache(row, device)) least = has_band ? kLeastTogether : 1;
  const int64_t blocks = ceil_div(problem.seqlen_k, row.columns) * sm90_blocks_of_work(row) * parts;
  return std::max({least, ceil_div(device.multiprocessors, blocks),
                   bytes_together(row, head, has_band, problem.has(kBoolMask), device) /
                       std::max<int64_t>(each, 1)});
}

// For packed sequences: the queries, of this many heads, that amount to about as much.
int64_t rows_together(const AttentionCase& problem, const AttentionRow& row, int64_t heads,
                      int64_t multiprocessors) {
  const int64_t each = row.head_dim * 8 * problem.group() * heads;
  const int64_t full = ceil_div(multiprocessors * row.columns / sm90_blocks_of_work(row), heads);
  return std::clamp<int64_t>(kBytesTogether / each, full, int64_t{1} << 30);
}

}  // namespace

int64_t sm90_heads_together(const AttentionCase& problem, const AttentionRow& row, int64_t kv_heads,
                            int64_t parts, bool has_band, const Device& device) {
  const int64_t least = heads_together(problem, row, parts, has_band, device);
  return sm90_size_of_sets(kv_heads, least, 2 * least);
}

int64_t sm90_convert_blocks(const PackageKernel& kernel, int64_t warps, bool rounds,
                            const Device& device) {
  constexpr int64_t kOnMultiprocessor = 4;
  const int64_t blocks = ceil_div(warps, kernel.entry().block[0] / 32);
  return rounds ? std::min<int64_t>(blocks, kOnMultiprocessor * device.multiprocessors) : blocks;
}

namespace {

constexpr AttentionStep sm90_backward_step(const char* kind, bool needs_features = false) {
  return {kind, "attention/sm90/backward", sizeof(Sm90BackwardParams), needs_features};
}
constexpr AttentionStep kSm90BackwardStep = sm90_backward_step("backward", true);
constexpr AttentionStep kSm90BackwardMaskStep = sm90_backward_step("mask", true);
constexpr AttentionStep kSm90DeltaStep = sm90_backward_step("delta");
constexpr AttentionStep kSm90ConvertStep = sm90_backward_step("convert");

struct Sm90BackwardPlan {
  const AttentionRow* delta;
  const AttentionRow* backward;
  const AttentionRow* pair;  // used instead if the device runs clusters of two; or null
  const AttentionRow* convert;
  int64_t batch;  // that the number of parts and sets may depend on; 0: there is one
};

class Sm90Backward : public AttentionBackwardKernels {
 public:
  Sm90Backward(const Device& device, const AttentionEntries& entries)
      : device_(device),
        delta_(entries.table(kSm90DeltaStep)),
        convert_(entries.table(kSm90ConvertStep)),
        order_(entries.kernel(kSm90OrderStep, "keys")) {
    entries.each(kSm90BackwardStep, [&](const AttentionRow& row) {
      (sm90_blocks_of_work(row) > 1 ? pairs_ : backward_).add(row);
    });
    entries.each(kSm90BackwardMaskStep, [&](const AttentionRow& row) {
      (row.takes & kBoolMask ? mask_ : added_mask_) = row.kernel;
    });
  }

  BackwardPlan plan(const AttentionCase& problem) const override {
    BackwardPlan plan;
    const AttentionDtype dtype = attention_dtype(problem.dtype);
    if (dtype == kAttendDtypes || (problem.has(kBoolMask) && mask_ == nullptr) ||
        (problem.has(kAnyAdded) &&
         (added_mask_ == nullptr || problem.mask_bytes > kMostMaskBytes)) ||
        (problem.packed && order_ == nullptr) || !problem.has_scores()) {
      return plan;
    }
    const int64_t width = std::max(problem.head_dim, problem.head_dim_v);
    const AttentionRow* row = backward_.first(dtype, problem.needs, width);
    const AttentionRow *delta = delta_.first(dtype), *convert = convert_.first(dtype);
    if (row == nullptr || delta == nullptr || convert == nullptr) return plan;
    const AttentionRow* pair = pairs_.first(dtype, problem.needs, width);
    if (pair != nullptr && (pair->head_dim != row->head_dim || pair->rows != row->rows ||
                            problem.seqlen_k > kSm90MostPairs * pair->columns)) {
      pair = nullptr;
    }
    // Counts whole tiles: few queries leave most of one empty, and the portable kernels are then
    // quicker. Pairs are counted like single blocks: they only take less.
    const int64_t tiles = ceil_div(problem.seqlen_q, row->rows) * problem.heads;
    const int64_t blocks = ceil_div(problem.seqlen_k, row->columns);
    const double steps = static_cast<double>(problem.batch) * tiles * blocks;
    plan.microseconds = (steps / device_.multiprocessors) * static_cast<double>(row->cost_tile) /
                        device_.cycles_per_microsecond;
    // One kernel has to serve every number of rows, and take its steps in one order: a sequence has
    // the same gradients with padding behind it, and packed.
    if (problem.batch_invariant) plan.microseconds = 0;
    const int64_t batch = problem.batch_invariant ? 0 : problem.batch;
    plan.set(Sm90BackwardPlan{delta, row, pair, convert, batch});
    return plan;
  }

  void launch(const BackwardPlan& plan, const AttentionCase& problem, const FusedOperands& operands,
              const float* logsumexp) const override {
    const auto chosen = plan.get<Sm90BackwardPlan>();
    const bool in_pairs =
        chosen.pair != nullptr && clusters_.ask(*chosen.pair->kernel, device_) >= 2;
    const AttentionRow& row = in_pairs ? *chosen.pair : *chosen.backward;
    const int64_t in_cluster = sm90_blocks_of_work(row);
    const bool packed = problem.packed;
    const Sm90Rows rows(problem, operands);
    const int64_t tiles = rows.tiles(rows.q, row.rows);
    const int64_t key_tiles = rows.tiles(rows.k, row.columns);
    const int64_t heads = (packed ? 1 : problem.batch) * problem.heads;
    const int64_t kv_heads = (packed ? 1 : problem.batch) * problem.kv_heads;
    AttentionParams all = operands.params(problem.head_dim, problem.head_dim_v);
    const bool has_band = all.first != -kNoBound || all.last != kNoBound;
    const Sm90KeyShares shares = shares_of(chosen, problem, row, rows, all);
    const int64_t parts = shares.parts;
    // The sums of a work item, and the warps of the last kernel that read them.
    const int64_t part_floats = parts > 1 ? 2 * row.columns * row.head_dim : 0;
    const int64_t join_warps = kv_heads * key_tiles * (part_floats / (16 * 32));
    const int64_t dq_panels = ceil_div(row.head_dim, 64);
    const int64_t convert_warps = heads * tiles * (row.rows / 8) * dq_panels + join_warps;
    const int64_t delta_blocks = heads * tiles;
    const int64_t convert_blocks =
        sm90_convert_blocks(*chosen.convert->kernel, convert_warps,
                            row.rounds && parts == 1 && shares.sets == 1 && !packed, device_);
    const int64_t work_items = kv_heads * key_tiles * parts;
    const int64_t blocks =
        std::min<int64_t>(work_items, device_.multiprocessors / in_cluster) * in_cluster;
    check_blocks(std::max({delta_blocks, convert_blocks, work_items * in_cluster}));
    check_blocks(convert_warps, kMaxGrid[0], "warps");  // which that kernel numbers with 32 bits
    // Floats of a tile: two for each query, dq, and the turn; and the ticket, after which addresses
    // are multiples of 16 again.
    const int64_t sums = heads * tiles * 2 * row.rows;
    const int64_t dq_sum = shares.sets * heads * tiles * row.rows * dq_panels * 64;
    const int64_t turns = shares.sets * heads * tiles;
    const int64_t floats = ceil_div(sums + dq_sum + turns + 1, 4) * 4;
    const Workspace workspace(device_, 4 * (floats + work_items * part_floats));
    auto* const memory = reinterpret_cast<float*>(workspace.data());

    Sm90BackwardParams params{};
    params.dq_sum = memory;  // its additions are aligned to 16 bytes, as the sums' loads are
    params.sums = memory + dq_sum;
    params.turns = reinterpret_cast<int*>(memory + dq_sum + sums);
    params.ticket = reinterpret_cast<unsigned*>(params.turns + turns);
    params.tiles = static_cast<int>(tiles);
    params.key_tiles = static_cast<int>(key_tiles);

    params.part_sums = parts > 1 ? memory + floats : nullptr;
    params.parts = static_cast<int>(parts);
    params.set_keys = static_cast<int>(ceil_div(key_tiles, shares.sets));
    params.sets = static_cast<int>(shares.sets);
    params.query_tiles = static_cast<int>(heads * tiles);
    const int64_t together = sm90_heads_together(problem, row, kv_heads, parts, has_band, device_);
    params.together = static_cast<int>(together * parts);
    std::optional<Sm90TileOrder> order;
    if (packed) {
      operands.fill(all, 0);
      order.emplace(device_, key_tiles);
      order_tiles(*order, problem, row, together, all);
      params.order = order->data();
      if (problem.batch == 0) return;
    }
    for (int64_t launch = 0; launch < operands.problem.parts(); ++launch) {
      operands.fill(all, launch);
      fill(params, row, all, rows);
      params.logsumexp = logsumexp + launch * heads * problem.seqlen_q;
      std::optional<Workspace> mask;
      if (all.mask != nullptr) fill_mask(params, all, row.dtype, mask);
      torch_cubin::launch(*chosen.delta->kernel, {delta_blocks}, device_, params);
      torch_cubin::launch(*row.kernel, {blocks}, device_, params);
      torch_cubin::launch(*chosen.convert->kernel, {convert_blocks}, device_, params);
    }
  }

  bool clears_empty_rows() const override { return true; }

 private:
  Sm90KeyShares shares_of(const Sm90BackwardPlan& plan, const AttentionCase& problem,
                          const AttentionRow& row, const Sm90Rows& rows,
                          const AttentionParams& all) const {
    const Sm90Lengths lengths = sm90_lengths(all);
    const int64_t sequences = rows.packed ? rows.sequences : 1;
    Sm90KeyShares shares = sm90_key_shares(
        {plan.batch * problem.kv_heads, problem.group(),
         device_.multiprocessors / sm90_blocks_of_work(row), ceil_div(rows.q, sequences),
         ceil_div(rows.k, sequences), std::min(problem.seqlen_q, rows.q),
         std::min(problem.seqlen_k, rows.k), lengths.first, lengths.last},
        row, device_);
    if (rows.packed) shares.sets = 1;  // those of the longest sequence would be in one set anyway
    return shares;
  }

  void order_tiles(const Sm90TileOrder& order, const AttentionCase& problem,
                   const AttentionRow& row, int64_t together, const AttentionParams& all) const {
    Sm90OrderParams params{};
    params.rows_together =
        static_cast<int>(rows_together(problem, row, together, device_.multiprocessors));
    const int64_t kv_heads = all.heads / all.group;
    params.empty_rows[0] = sm90_empty_rows(all.dq, all.dq_stride, all.heads, all.head_dim, false);
    params.empty_rows[1] = sm90_empty_rows(all.dk, all.dk_stride, kv_heads, all.head_dim, true);
    params.empty_rows[2] = sm90_empty_rows(all.dv, all.dv_stride, kv_heads, all.head_dim_v, true);
    order.make(*order_, device_, row, all, params);
  }

  // Launches the kernel that converts a mask, for the mask's batches, heads and tiles of queries.
  void fill_mask(Sm90BackwardParams& params, const AttentionParams& all, AttentionDtype dtype,
                 std::optional<Workspace>& memory) const {
    const auto size = [&](int dim, int all_of) { return all.mask_stride[dim] == 0 ? 1 : all_of; };
    Sm90MaskSteps& bits = params.bits;
    bits.batches = size(0, all.batch);
    bits.heads = size(1, all.heads);
    bits.tiles = size(2, params.tiles);
    const int64_t tiles = int64_t{bits.batches} * bits.heads * bits.tiles;
    const int64_t steps = tiles * params.key_tiles;
    params.mask = all.mask;
    std::copy_n(all.mask_stride, 4, params.mask_stride);
    params.mask_added = (all.flags & kAttendBoolMask) == 0 ? 1 : 0;
    params.mask_floats = (all.flags & kAttendFloatMask) != 0 ? 1 : 0;
    params.minus_infinity = minus_infinity(params.mask_floats != 0, dtype);
    const int64_t scores = params.tile_rows * params.tile_keys;  // of a step
    const int64_t words =
        steps * (params.mask_added == 0 ? 2 * params.tile_keys * ceil_div(params.tile_rows / 2, 32)
                                        : scores / (params.mask_floats != 0 ? 1 : 2));
    memory.emplace(device_, 4 * (words + steps));
    bits.words = reinterpret_cast<unsigned*>(memory->data());
    bits.steps = bits.words + words;
    if (params.mask_added != 0) {
      torch_cubin::launch(*added_mask_, {steps}, device_, params);
    } else {
      torch_cubin::launch(*mask_, {tiles * ceil_div(all.seqlen_k, kMaskChunk)}, device_, params);
    }
  }

  void fill(Sm90BackwardParams& params, const AttentionRow& row, const AttentionParams& all,
            const Sm90Rows& rows) const {
    fill_sm90_params(params, row, all, rows, row.rows, row.columns / sm90_blocks_of_work(row),
                     device_);
    fill_sm90_gradients(params, row, all, rows, device_);
    // Kernels for additive masks, too, which may serve calls without one.
    params.logsumexp_unit =
        (row.takes & (kScoreRule | kAnyAdded)) != 0 ? 1.0f : static_cast<float>(kLog2e);
  }

  const Device& device_;
  AttentionTable delta_, backward_, convert_;
  AttentionTable pairs_;  // for heads that backward_ supports too
  ClusterCapacity clusters_{2};
  PackageKernel* order_;
  PackageKernel* mask_ = nullptr;
  PackageKernel* added_mask_ = nullptr;
};

void check_backward_row(const AttentionStep& step, const AttentionRow& row) {
  if (&step == &kSm90OrderStep || &step == &kSm90BackwardMaskStep) return;
  check_16_bit(row);
  if (&step != &kSm90BackwardStep) return;
  const KernelFields fields(*row.kernel);
  const auto& cluster = row.kernel->entry().cluster;
  if (cluster[0] > (row.head_dim > 128 ? 2 : 1) || cluster[1] > 1 || cluster[2] > 1) {
    fields.refuse("cluster", "two blocks at most, for wide heads");
  }
  const int64_t keys = row.head_dim > 128 ? 64 * sm90_blocks_of_work(row) : 128;
  if (row.columns != keys) fields.refuse("tile", std::to_string(keys) + " keys");
  // The capacity of sm90/backward_mask.cu.
  if (row.rows > 96) fields.refuse("tile", "at most 96 queries");
}

const AttentionBackend g_sm90_backward({&kSm90BackwardStep, &kSm90DeltaStep, &kSm90ConvertStep,
                                        &kSm90OrderStep, &kSm90BackwardMaskStep},
                                       &make_kernels<Sm90Backward>, &check_backward_row);

}  // namespace
}  // namespace torch_cubin
