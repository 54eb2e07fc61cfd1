// The backend of csrc/kernels/attention/sm90/e4m3.cu: attention forward on Hopper, for
// float8_e4m3fn, with lengths and the band only. sm90/e4m3_values.cu transposes the values before
// it, unless its blocks do; packed sequences also need sm90/order.cu.
#include <algorithm>

#include "ops/attention/sm90/map.h"
#include "ops/attention/sm90/schedule.h"
#include "ops/common/launch.h"

namespace torch_cubin {
namespace {

constexpr AttentionStep kE4m3ForwardStep{"forward", "attention/sm90/e4m3", sizeof(Sm90E4m3Params),
                                         true};
constexpr int64_t kE4m3QueryRows = 64;  // of a box: those of a warpgroup
constexpr int64_t kE4m3MostTiles = (int64_t{1} << 31) - 1 - 2 * kSm90MostBlocks;
constexpr int64_t kMostKeys = (int64_t{1} << 31) - 1;
constexpr double kE4m3Log2e = 1.4426950408889634;

// The keys of a box of the values.
int64_t key_panel(const AttentionRow& row) { return row.columns % 128 == 0 ? 128 : 64; }

// The columns of a box of the others.
int64_t column_panel(const AttentionRow& row) { return row.head_dim < 128 ? 64 : 128; }

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
    params.unit = static_cast<float>(all.scale * kE4m3Log2e);
    const AttentionViews& options = operands.call.views;
    params.q_descale = sm90_descale(options.q_descale);
    params.k_descale = sm90_descale(options.k_descale);
    params.v_descale = sm90_descale(options.v_descale);
    const Grid grid = {std::min(blocks_, tiles * heads)};
    if (!rows.packed) {
      params.fewer = sm90_fewer_queries(row, band);
      const Sm90Heads sets(all, row, tiles, 1);
      params.schedule = sm90_tile_schedule(row, band, sets, blocks_, device_);
      if (params.schedule == kInPairs && sm90_idle_in_pairs(sets, blocks_) > kSm90IdleInPairs) {
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
    return 1 - saved * static_cast<double>(rounds / each) / static_cast<double>(rounds);
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

class Sm90E4m3Backend : public AttentionBackend {
 public:
  Sm90E4m3Backend() : AttentionBackend({&kE4m3ForwardStep, &kSm90TransposeStep, &kSm90OrderStep}) {}

  std::unique_ptr<AttentionForwardKernels> forward(const Device& device,
                                                   const AttentionEntries& entries) const override {
    return std::make_unique<Sm90E4m3Forward>(device, entries);
  }

 private:
  // Not optional here: a kernel of an earlier build would read values in the wrong order.
  void check_row(const AttentionStep& step, const AttentionRow& row) const override {
    if (&step == &kE4m3ForwardStep) KernelFields(*row.kernel).integer("transposes_values", 0, 1);
  }
};

const Sm90E4m3Backend g_sm90_e4m3_attention;

}  // namespace

}  // namespace torch_cubin
