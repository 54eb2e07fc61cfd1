// The backends of attention on Hopper for float8_e4m3fn, with lengths and the band only.
//
// The forward is csrc/kernels/attention/sm90/e4m3.cu. sm90/e4m3_values.cu transposes the values
// before it, unless its blocks do; packed sequences also need sm90/order.cu. The gradients are
// sm90/e4m3_backward.cu: before it sm90/e4m3_backward_delta.cu sums the rows, and after it
// sm90/e4m3_backward_convert.cu ends dq.
#include <algorithm>

#include "kernels/attention/sm90/e4m3_backward_params.h"
#include "ops/attention/sm90/params.h"
#include "ops/attention/sm90/schedule.h"
#include "ops/common/cluster_capacity.h"
#include "ops/common/launch.h"

namespace torch_cubin {
namespace {

constexpr AttentionStep kE4m3ForwardStep{"forward", "attention/sm90/e4m3", sizeof(Sm90E4m3Params),
                                         true};
constexpr int64_t kE4m3QueryRows = 64;  // of a box: those of a warpgroup
constexpr int64_t kE4m3MostTiles = (int64_t{1} << 31) - 1 - 4 * kSm90MostBlocks;
constexpr int64_t kMostKeys = (int64_t{1} << 31) - 1;

// The keys of a box of the values.
int64_t key_panel(const AttentionRow& row) { return row.columns % 128 == 0 ? 128 : 64; }

// The columns of a box of the others.
int64_t column_panel(const AttentionRow& row) { return row.head_dim < 128 ? 64 : 128; }

template <class Params>
void set_descales(Params& params, const AttentionViews& options) {
  params.q_descale = sm90_descale(options.q_descale);
  params.k_descale = sm90_descale(options.k_descale);
  params.v_descale = sm90_descale(options.v_descale);
}

// The kernel that transposes values: cycles with none, and its part of the memory's peak rate.
constexpr double kTransposeCycles = 3500, kTransposeRate = 0.75;

class Sm90E4m3Forward : public AttentionForwardKernels {
 public:
  Sm90E4m3Forward(const Device& device, const AttentionEntries& entries)
      : device_(device),
        blocks_(sm90_blocks(device)),
        rows_(entries.table(kE4m3ForwardStep)),
        values_(entries.kernel(kSm90TransposeStep, "values")),
        order_(entries.kernel(kSm90OrderStep, "queries")) {}

  ForwardPlan plan(const AttentionCase& problem) const override {
    ForwardPlan plan;
    if (problem.dtype != ScalarType::Float8_e4m3fn || values_ == nullptr ||
        (problem.packed && order_ == nullptr) || !problem.has_scores()) {
      return plan;
    }
    choose(problem, {problem.seqlen_q, problem.seqlen_k, -kNoBound, kNoBound}, &plan.microseconds);
    return plan;
  }

  void launch(const ForwardPlan&, const AttentionCase& problem, const FusedOperands& operands,
              float* logsumexp) const override {
    AttentionParams all = operands.params(problem.head_dim, problem.head_dim_v);
    operands.fill(all, 0);  // with one dim of batches there is one part
    all.logsumexp = logsumexp;
    const Sm90Lengths lengths = sm90_lengths(all);
    const Sm90Band band = {all.seqlen_q, all.seqlen_k, lengths.first, lengths.last};
    double time;
    const AttentionRow& row = *choose(problem, band, &time);
    const Sm90Rows rows(problem, operands);
    const int64_t tiles = rows.tiles(rows.q, row.rows);
    const int64_t heads = rows.packed ? all.heads : int64_t{all.batch} * all.heads;
    if (!check_blocks(tiles * heads, kE4m3MostTiles, "tiles of output")) return;
    Sm90E4m3Params params{};
    fill(params, row, all, rows);
    std::optional<Workspace> values;
    if (row.transposes) {
      encode_sm90_byte_map(params.v, rows.of_keys(all, all.v, all.v_stride, all.head_dim_v),
                           column_panel(row), row.columns, device_);
    } else {
      transpose_values(params, row, all, rows, values);
    }
    params.logsumexp = logsumexp;
    params.tiles = static_cast<int>(tiles);
    params.unit = static_cast<float>(all.scale * kLog2e);
    set_descales(params, operands.call.views);
    const Grid grid = {std::min(blocks_, tiles * heads)};
    if (!rows.packed) {
      params.fewer = sm90_fewer_queries(row, band);
      const Sm90Heads sets(all, row, tiles, 1);
      const int64_t teams = blocks_ * row.teams;
      params.schedule = sm90_tile_schedule(row, band, sets, teams, device_);
      if (params.schedule > 0 && teams > kSm90MostBlocks) params.schedule = kInPairs;
      if (params.schedule == kInPairs && sm90_idle_in_pairs(sets, teams) > kSm90IdleInPairs) {
        // Without the kernel before there is no counter of tiles.
        params.schedule =
            params.next != nullptr ? sm90_heads_together(sets, device_, true) : kByQueries;
      } else {
        params.next = nullptr;
      }
      torch_cubin::launch(*row.kernel, grid, device_, params);
      return;
    }
    const Sm90TileOrder order(device_, tiles);
    params.out_stride[0] = 0;
    params.order = order.data();
    order.make_of_queries(*order_, device_, row, all);
    torch_cubin::launch(*row.kernel, grid, device_, params);
  }

  bool clears_empty_rows() const override { return true; }

 private:
  // The quickest kernel that is wide enough; null, and an infinite time, if there is none.
  const AttentionRow* choose(const AttentionCase& problem, const Sm90Band& band,
                             double* time) const {
    *time = std::numeric_limits<double>::infinity();
    const AttentionRow* best = nullptr;
    const int64_t width = std::max(problem.head_dim, problem.head_dim_v);
    rows_.for_each(kAttendBFloat16, problem.needs, width, [&](const AttentionRow& row) {
      const int64_t tiles = ceil_div(band.seqlen_q, row.rows) * problem.heads * problem.batch;
      double cycles = sm90_launch_cycles(row, band, tiles, blocks_);
      cycles *= of_partial_tiles(row, problem.seqlen_q, tiles);
      if (!row.transposes) cycles += transpose_cycles(problem);
      const double own = cycles / device_.cycles_per_microsecond;
      if (!(own < *time)) return;
      *time = own;
      best = &row;
    });
    return best;
  }

  // The share of the time that is left where consumers skip tiles of which they have no rows: of
  // three, one alone takes half the time of a tile, and two nearly all of it. Each block has one
  // such tile in as many as a head has.
  double of_partial_tiles(const AttentionRow& row, int64_t seqlen_q, int64_t tiles) const {
    const int64_t rest = ceil_div(seqlen_q % row.rows, kE4m3QueryRows);
    if (!row.transposes || row.rows != 3 * kE4m3QueryRows || rest == 0) return 1;
    const int64_t rounds = ceil_div(tiles, blocks_), each = ceil_div(seqlen_q, row.rows);
    const double saved = rest == 1 ? 0.5 : rest == 2 ? 0.15 : 0;
    const int64_t partial = rounds / each;
    return 1 - saved * static_cast<double>(partial) / static_cast<double>(rounds);
  }

  double transpose_cycles(const AttentionCase& problem) const {
    const double heads = static_cast<double>(problem.batch * problem.kv_heads);
    const double bytes = 2 * heads * problem.seqlen_k * problem.head_dim_v;  // read and written
    return kTransposeCycles + bytes / (kTransposeRate * device_.bytes_per_cycle);
  }

  // Launches the kernel that transposes the values, into `memory`, and sets the counter of tiles.
  void transpose_values(Sm90E4m3Params& params, const AttentionRow& row, const AttentionParams& all,
                        const Sm90Rows& rows, std::optional<Workspace>& memory) const {
    const int64_t kv_heads = all.heads / all.group, batch = rows.packed ? 1 : all.batch;
    const int64_t granule = rows.packed ? row.columns : kTransposedGroup;
    const int64_t keys = (ceil_div(rows.k, granule) + (rows.packed ? rows.sequences : 0)) * granule;
    check_blocks(keys, kMostKeys, "keys with padding between sequences");
    const int64_t columns = all.head_dim_v;
    const int64_t bytes = batch * kv_heads * columns * keys;  // a multiple of 16
    memory.emplace(device_, bytes + static_cast<int64_t>(sizeof(int)));
    params.next = reinterpret_cast<int*>(memory->data() + bytes);

    Sm90E4m3ValuesParams values{};
    values.v = static_cast<const unsigned char*>(all.v);
    values.out = reinterpret_cast<unsigned char*>(memory->data());
    values.next = params.next;
    std::copy_n(all.v_stride, 3, values.stride);
    if (rows.packed) values.stride[0] = 0;
    values.columns = static_cast<int>(columns);
    values.keys = static_cast<int>(keys);
    values.granule = static_cast<int>(granule);
    transpose_keys(*values_, device_, all, rows, values);
    const tc_int64 strides[3] = {kv_heads * columns * keys, columns * keys, keys};
    encode_sm90_byte_map(params.v, {memory->data(), strides, keys, columns, kv_heads, batch, false},
                         key_panel(row), row.head_dim, device_);
  }

  // Fills the operands' sizes and strides, and the maps but the values'.
  void fill(Sm90E4m3Params& params, const AttentionRow& row, const AttentionParams& all,
            const Sm90Rows& rows) const {
    const int64_t panel = column_panel(row);
    encode_sm90_byte_map(params.q, rows.of_queries(all, all.q, all.q_stride, all.head_dim), panel,
                         kE4m3QueryRows, device_);
    encode_sm90_byte_map(params.k, rows.of_keys(all, all.k, all.k_stride, all.head_dim), panel,
                         row.columns, device_);
    fill_sm90_sizes(params, all);
  }

  const Device& device_;
  int64_t blocks_;
  AttentionTable rows_;  // of bfloat16, the output's dtype
  PackageKernel *values_, *order_;
};

// Not optional here: a kernel of an earlier build would read values in the wrong order.
void check_e4m3_row(const AttentionStep& step, const AttentionRow& row) {
  if (&step == &kE4m3ForwardStep) KernelFields(*row.kernel).integer("transposes_values", 0, 1);
}

const AttentionBackend g_sm90_e4m3_attention({&kE4m3ForwardStep, &kSm90TransposeStep,
                                              &kSm90OrderStep},
                                             &make_kernels<Sm90E4m3Forward>, &check_e4m3_row);

}  // namespace

namespace {

constexpr AttentionStep e4m3_backward_step(const char* kind, bool needs_features = false) {
  return {kind, "attention/sm90/e4m3_backward", sizeof(Sm90E4m3BackwardParams), needs_features};
}
constexpr AttentionStep kE4m3BackwardStep = e4m3_backward_step("backward", true);
constexpr AttentionStep kE4m3DeltaStep = e4m3_backward_step("delta");
constexpr AttentionStep kE4m3ConvertStep = e4m3_backward_step("convert");
constexpr int64_t kWorkspaceStep = 128;  // bytes between the parts of the workspace
// With more, q in bfloat16 is made before the kernel: in the kernel that costs each step some 2%,
// and before it as much memory as 4 bytes an element. H200, 16,384 tokens, of the time of bfloat16,
// made before and in the kernel: 512 rows of 64 columns 0.83 and 0.92, of 128 0.905 and 1.00; 2,048
// 0.95 and 0.93, 1.09 and 1.11; 8,192 1.02 and 0.93, 1.15 and 1.16.
constexpr int64_t kMostWidenedKeys = 2048;
// From how many keys on blocks of 128 columns work in pairs. With an odd number of tiles of keys
// the last pair has a block without keys; with a band, which has to be as wide, both take the steps
// that only one of them has visible keys in. Up to the last two numbers, without and with a band,
// they make q, as single blocks do. H200, 16,384 tokens, of the time of single blocks: 256 keys
// 0.89, 384 1.09, 512 0.92, causal 1.03, 640 1.05, 768 0.92, 896 1.02, 1,024 causal 1.00, 1,280
// 0.985, 1,536 0.97; of that of pairs for which q is made before: 1,024 keys 0.97, 1,152 0.985,
// 1,408 1.02, 2,048 causal 1.02. 16,384 with a window of 1,024 take 1.05 of the time of single
// blocks.
constexpr int64_t kLeastKeysOfPairs = 129, kLeastBandOfPairs = 1280;
constexpr int64_t kLeastOddKeysOfPairs = 1025, kKeysOfBlock = 128;
constexpr int64_t kMostWidenedKeysOfPairs = 1280, kMostWidenedBandOfPairs = 2047;

// Parts of one allocation, each a multiple of kWorkspaceStep from its begin.
class WorkspaceParts {
 public:
  // The offset of a part of this many bytes.
  int64_t add(int64_t bytes) {
    const int64_t at = size_;
    size_ += ceil_div(bytes, kWorkspaceStep) * kWorkspaceStep;
    return at;
  }
  int64_t size() const { return size_; }

 private:
  int64_t size_ = 0;
};

class Sm90E4m3Backward : public AttentionBackwardKernels {
 public:
  Sm90E4m3Backward(const Device& device, const AttentionEntries& entries)
      : device_(device),
        rows_(entries.table(kE4m3BackwardStep)),
        delta_(entries.table(kE4m3DeltaStep)),
        convert_(entries.kernel(kE4m3ConvertStep)) {}

  BackwardPlan plan(const AttentionCase& problem) const override {
    BackwardPlan plan;
    if (problem.dtype != ScalarType::Float8_e4m3fn || problem.packed ||
        delta_.first(kAttendBFloat16) == nullptr || convert_ == nullptr || !problem.has_scores()) {
      return plan;
    }
    const AttentionRow* row = row_for(problem, Pairs::none);  // pairs only take less
    if (row == nullptr) return plan;
    const double steps = static_cast<double>(problem.batch) * problem.heads *
                         ceil_div(problem.seqlen_q, row->rows) *
                         ceil_div(problem.seqlen_k, row->columns);
    plan.microseconds =
        steps / device_.multiprocessors * row->cost_tile / device_.cycles_per_microsecond;
    return plan;
  }

  void launch(const BackwardPlan&, const AttentionCase& problem, const FusedOperands& operands,
              const float* logsumexp) const override {
    AttentionParams all = operands.params(problem.head_dim, problem.head_dim_v);
    operands.fill(all, 0);  // with one dim of batches there is one part
    const bool has_band = all.first != -kNoBound || all.last != kNoBound;
    const Pairs pairs = pairs_for(problem.seqlen_k, int64_t{all.last} - all.first, has_band);
    const AttentionRow &row = *row_for(problem, pairs), &delta = *delta_.first(kAttendBFloat16);
    const Sm90Rows rows(problem, operands);
    const int64_t kv_heads = all.heads / all.group, batch = all.batch;
    const int64_t tiles = rows.tiles(rows.q, row.rows);
    const int64_t key_tiles = rows.tiles(rows.k, row.columns);
    const int64_t query_tiles = batch * all.heads * tiles;
    const int64_t dq_panels = ceil_div(row.head_dim, 64);

    WorkspaceParts parts;
    const int64_t dq_sum = parts.add(query_tiles * row.rows * dq_panels * 64 * 4);
    const int64_t sums = parts.add(query_tiles * row.rows * 3 * 4);
    const int64_t row_factors = parts.add(query_tiles * row.rows * 4);
    const int64_t turns = parts.add(query_tiles * 4);
    const int64_t ticket = parts.add(4);
    const int64_t grad_rows = parts.add(batch * all.heads * rows.q * all.head_dim_v);
    const int64_t wide_query =
        row.widens ? 0 : parts.add(batch * all.heads * rows.q * all.head_dim * 2);
    const Workspace workspace(device_, parts.size());
    char* const memory = reinterpret_cast<char*>(workspace.data());

    Sm90E4m3BackwardParams params{};
    params.dq_sum = reinterpret_cast<float*>(memory + dq_sum);
    params.sums = reinterpret_cast<float*>(memory + sums);
    params.row_factors = reinterpret_cast<float*>(memory + row_factors);
    params.turns = reinterpret_cast<int*>(memory + turns);
    params.ticket = reinterpret_cast<unsigned*>(memory + ticket);
    params.grad_rows = reinterpret_cast<unsigned char*>(memory + grad_rows);
    if (!row.widens) params.wide_query = reinterpret_cast<unsigned short*>(memory + wide_query);
    params.query = static_cast<const unsigned char*>(all.q);
    std::copy_n(all.q_stride, 3, params.query_stride);
    fill_operands(params, row, all, rows, logsumexp);
    set_descales(params, operands.call.views);
    fill_maps(params, row, all, rows);
    params.tiles = static_cast<int>(tiles);
    params.key_tiles = static_cast<int>(key_tiles);
    params.query_tiles = static_cast<int>(query_tiles);
    params.parts = params.sets = 1;
    params.set_keys = static_cast<int>(key_tiles);
    params.together =
        static_cast<int>(sm90_heads_together(problem, row, batch * kv_heads, 1, has_band, device_));

    const int64_t work_items = batch * kv_heads * key_tiles, in_cluster = sm90_blocks_of_work(row);
    const int64_t blocks =
        std::min<int64_t>(work_items, device_.multiprocessors / in_cluster) * in_cluster;
    const int64_t delta_blocks = query_tiles * (row.rows / delta.rows);
    const int64_t convert_warps = query_tiles * (row.rows / 8) * dq_panels;
    const int64_t convert_blocks = ceil_div(convert_warps, convert_->entry().block[0] / 32);
    check_blocks(std::max({delta_blocks, convert_blocks, work_items * in_cluster}));
    check_blocks(convert_warps, kMaxGrid[0], "warps");
    torch_cubin::launch(*delta.kernel, {delta_blocks}, device_, params);
    torch_cubin::launch(*row.kernel, {blocks}, device_, params);
    torch_cubin::launch(*convert_, {convert_blocks}, device_, params);
  }

  bool clears_empty_rows() const override { return true; }

 private:
  enum class Pairs { none, plain, widening };

  // `band`: its columns.
  static Pairs pairs_for(int64_t keys, int64_t band, bool has_band) {
    const bool odd = ceil_div(keys, kKeysOfBlock) % 2 != 0;
    if (std::min(keys, band) < (has_band ? kLeastBandOfPairs : kLeastKeysOfPairs) ||
        (odd && keys < kLeastOddKeysOfPairs)) {
      return Pairs::none;
    }
    const int64_t most = has_band ? kMostWidenedBandOfPairs : kMostWidenedKeysOfPairs;
    return keys <= most ? Pairs::widening : Pairs::plain;
  }

  // `pairs`: a row whose blocks work in pairs, if the device runs clusters of two.
  const AttentionRow* row_for(const AttentionCase& problem, Pairs pairs) const {
    const bool widens = problem.seqlen_k <= kMostWidenedKeys;
    const AttentionRow *chosen = nullptr, *pair = nullptr;
    rows_.for_each(kAttendBFloat16, problem.needs, std::max(problem.head_dim, problem.head_dim_v),
                   [&](const AttentionRow& row) {
                     if (sm90_blocks_of_work(row) > 1) {
                       if (pairs != Pairs::none && row.widens == (pairs == Pairs::widening) &&
                           problem.seqlen_k <= kSm90MostPairs * row.columns &&
                           clusters_.ask(*row.kernel, device_) >= 2) {
                         pair = &row;
                       }
                     } else if (chosen == nullptr || row.widens == widens) {
                       chosen = &row;
                     }
                   });
    return pair != nullptr ? pair : chosen;
  }

  void fill_operands(Sm90E4m3BackwardParams& params, const AttentionRow& row,
                     const AttentionParams& all, const Sm90Rows& rows,
                     const float* logsumexp) const {
    fill_sm90_sizes(params, all);
    fill_sm90_gradients(params, row, all, rows, device_);
    params.logsumexp = logsumexp;
    params.logsumexp_unit = static_cast<float>(kLog2e);
    params.score.keep_scale = 1.0f;
  }

  void fill_maps(Sm90E4m3BackwardParams& params, const AttentionRow& row,
                 const AttentionParams& all, const Sm90Rows& rows) const {
    const int64_t panel = column_panel(row);
    const auto bytes = [&](Sm90AttentionMap& map, const Sm90MapRows& of, int64_t box_rows) {
      encode_sm90_byte_map(map, of, panel, box_rows, device_);
    };
    bytes(params.q, rows.of_queries(all, all.q, all.q_stride, all.head_dim), row.rows);
    const int64_t keys = row.columns / sm90_blocks_of_work(row);
    bytes(params.k, rows.of_keys(all, all.k, all.k_stride, all.head_dim), keys);
    bytes(params.v, rows.of_keys(all, all.v, all.v_stride, all.head_dim_v), keys);
    if (params.wide_query != nullptr) {
      const tc_int64 wide[3] = {all.heads * rows.q * all.head_dim, rows.q * all.head_dim,
                                all.head_dim};
      encode_sm90_map(params.wide_q, row,
                      rows.of_queries(all, params.wide_query, wide, all.head_dim), row.rows,
                      device_);
    }
    const tc_int64 own[3] = {all.heads * rows.q * all.head_dim_v, rows.q * all.head_dim_v,
                             all.head_dim_v};
    bytes(params.grad_bytes, rows.of_queries(all, params.grad_rows, own, all.head_dim_v), row.rows);
  }

  const Device& device_;
  AttentionTable rows_, delta_;  // of bfloat16, the gradients' dtype
  PackageKernel* convert_;
  ClusterCapacity clusters_{2};
};

const AttentionBackend g_sm90_e4m3_backward_attention({&kE4m3BackwardStep, &kE4m3DeltaStep,
                                                       &kE4m3ConvertStep},
                                                      &make_kernels<Sm90E4m3Backward>);

}  // namespace

}  // namespace torch_cubin
