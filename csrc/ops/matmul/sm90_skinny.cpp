// The backend of csrc/kernels/matmul/sm90_skinny.cu: products with at most 64 rows of A, or columns
// of B, on Hopper. The small operand is called the tokens, the other one the weights. Linear layers
// of the same tokens are planned as one product, whose weights are those of all layers.
//
// This file has over 500 lines because plans of a product and of several layers are made and
// launched by the same code.
#include "ops/matmul/sm90_skinny.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "kernels/matmul/sm90_skinny_params.h"
#include "ops/common/cluster_capacity.h"
#include "ops/common/device_tables.h"
#include "ops/common/launch.h"
#include "ops/matmul/backend.h"
#include "ops/matmul/sm90_stream.h"
#include "runtime/tensor_map.h"

namespace torch_cubin {
namespace {

constexpr int64_t kSkinnyBlockK = 128;           // of the kernels
constexpr int64_t kSkinnyPanelBytes = 128;       // of a row in shared memory
constexpr int64_t kSkinnyGroupBytes = 128 * 16;  // the sums of 64 rows x 8 tokens
constexpr int64_t kSkinnyMostStages = 16, kEnoughStages = 4, kFewStages = 3;
constexpr int64_t kBeside = 4096;         // bytes of shared memory, at least as many as are static
constexpr int64_t kSkinnyMostSplits = 8;  // blocks of a cluster, on every GPU
constexpr int64_t kUnevenRows = 64 + 32;  // of an uneven pair
constexpr int64_t kMostAlone = 32;  // tokens of streamed products whose blocks are not in pairs
constexpr int64_t kSkinnyLongK = 8192;
constexpr int64_t kLeastStreamed = 4;  // k blocks for each block of a streamed product
// Dynamic shared memory of a block that has half a multiprocessor, beside its static kilobyte: the
// next kernel's blocks then fit while this one's are running.
constexpr int64_t kSkinnyHalfShared = 113 * 1024 - 1024;
// Bytes of the weights that keep a block busy for long (15 us on the H200).
constexpr int64_t kSkinnyLongBytes = int64_t{1} << 20;

static_assert(kSkinnyLayers == kFusedWeights, "a group of layers is one launch of either kernel");

// The rows of each layer's weights: of a product, one layer.
struct SkinnyLayers {
  int64_t rows[kSkinnyLayers];  // 0 behind `count`
  int count;
  bool gated;  // two layers, of as many rows; a tile has half of its rows from each

  int64_t all_rows() const {
    int64_t sum = 0;
    for (int i = 0; i < count; ++i) sum += rows[i];
    return sum;
  }
  friend bool operator==(const SkinnyLayers& x, const SkinnyLayers& y) {
    return std::equal(x.rows, x.rows + kSkinnyLayers, y.rows) && x.count == y.count &&
           x.gated == y.gated;
  }
  int outputs() const { return gated ? 1 : count; }
  int64_t tiles(int i, int64_t tile_rows) const {
    return ceil_div(rows[i], gated ? tile_rows / 2 : tile_rows);
  }
  int64_t all_tiles(int64_t tile_rows) const {
    int64_t sum = 0;
    for (int i = 0; i < outputs(); ++i) sum += tiles(i, tile_rows);
    return sum;
  }
};

// How the weights' rows and K are divided: K of each tile among the blocks of a cluster, or the K
// of all tiles evenly among the multiprocessors, one by one or in pairs that share the tokens and
// have a tile of twice the rows.
enum class SkinnyStream : int32_t { kNone, kAlone, kPairs };

struct SkinnyTiles {
  int32_t rows, splits;
  SkinnyStream stream = SkinnyStream::kNone;
  bool in_order = false;  // streamed: the sums of a part are continued by the next part's block
  bool uneven = false;    // pairs of blocks with a tile of `rows`, and of half as many

  bool streamed() const { return stream != SkinnyStream::kNone; }
  int64_t together() const { return stream == SkinnyStream::kPairs ? 2 : 1; }
};

// One entry of the catalog.
struct SkinnyRow {
  explicit SkinnyRow(PackageKernel& kernel) : kernel(&kernel) {
    const KernelFields fields(kernel);
    gated = fields.integer("gated", 0, 1) != 0;
    stream = static_cast<SkinnyStream>(fields.integer("streams", 0, 2));
    constexpr const char* kMaths[] = {"float16", "bfloat16"};
    constexpr const char* kLayouts[] = {"nt", "nn"};
    constexpr Math kMathOf[] = {kMathFloat16, kMathBFloat16};
    math = kMathOf[fields.index("math", kMaths)];
    rows_contiguous = fields.index("layout", kLayouts) == 1;
    int64_t tile[3];
    fields.triple("tile", 8, tile);
    tokens = tile[0];
    rows = tile[1];
    if (tokens > kSkinnyMostTokens || tokens % 8 != 0 || rows % 64 != 0 ||
        tile[2] != kSkinnyBlockK) {
      fields.refuse("tile", "at most 64 tokens, whole blocks of 64 rows, and 128 of K");
    }
  }

  PackageKernel* kernel;
  Math math;
  bool rows_contiguous, gated;
  SkinnyStream stream;
  int64_t tokens, rows;  // at most
};

// What a launch needs besides the problem.
struct SkinnyPlan {
  const SkinnyRow* row;
  bool swapped;  // the tokens are B's columns
  SkinnyTiles tiles;
  int32_t tiles_count;
  int32_t stages;
  int32_t ring_bytes;
  int32_t shared;  // dynamic bytes
  int64_t blocks;
};

class Sm90Skinny : public MatmulKernels {
 public:
  Sm90Skinny(const Device& device, const std::vector<PackageKernel*>& kernels) : device_(device) {
    for (PackageKernel* kernel : kernels) rows_.emplace_back(*kernel);
  }

  static void check(PackageKernel& kernel) { SkinnyRow{kernel}; }

  // As many tiles as multiprocessors, or a whole multiple, and tiles of whole lines of 64 rows.
  // None depends on the number of tokens.
  void configs(const MatmulCase& c, MatmulConfigs& out) const override {
    if (!takes(c)) return;
    const SkinnySides sides(c);
    offer_all(c, sides, {{sides.rows_count}, 1, false}, out);
  }

  // False if no kernel takes the layers.
  bool run(const FusedLayer* const* layers, const SkinnyLayers& sizes) const {
    const FusedLayer& first = *layers[0];
    MatmulCase c = matmul_case(first.problem, first.operands);
    c.n = sizes.all_rows();
    c.activation = kActivationNone;  // of gated kernels
    if (SkinnySides(c).swapped || !takes(c)) return false;
    for (int i = 1; i < sizes.count; ++i) {
      if (layers[i]->problem.k_parts != first.problem.k_parts) return false;
    }
    // Planning takes as long as two launches.
    static thread_local RememberedLayers remembered[kRememberedLayers];
    size_t slot = static_cast<size_t>(c.m * 31 + c.k);
    for (const int64_t rows : sizes.rows) slot = slot * 31 + static_cast<size_t>(rows);
    RememberedLayers& known = remembered[slot % kRememberedLayers];
    if (known.plan.kernels != this || !(known.problem == c && known.sizes == sizes)) {
      known = {c, sizes, planned(c, sizes)};
    }
    if (known.plan.kernels == nullptr) return false;
    launch_layers(known.plan.get<SkinnyPlan>(), layers, sizes);
    return true;
  }

  bool has_capacity(const MatmulPlan& plan) const override {
    const auto chosen = plan.get<SkinnyPlan>();
    return chosen.tiles.splits == 1 ||
           clusters_.ask(*rows_.front().kernel, device_, device_.shared_optin - kBeside) ==
               kSkinnyMostSplits;
  }

  std::string name(const MatmulPlan& plan) const override {
    const auto chosen = plan.get<SkinnyPlan>();
    const std::string rows = "sm90_skinny " + std::to_string(chosen.tiles.rows) + " rows ";
    if (chosen.tiles.stream == SkinnyStream::kPairs) return rows + "streamed in pairs";
    if (chosen.tiles.streamed()) return rows + "streamed";
    if (chosen.tiles.uneven) return rows + "and 32";
    return rows + std::to_string(chosen.tiles.splits) + " splits";
  }

  void launch(const MatmulPlan& plan, const MatmulProblem& problem,
              const MatmulOperands& operands) const override {
    const auto chosen = plan.get<SkinnyPlan>();
    const FusedLayer layer = {problem, operands};
    const FusedLayer* const layers[] = {&layer};
    launch_layers(chosen, layers, {{chosen.swapped ? problem.m : problem.n}, 1, false});
  }

 private:
  // Which operand is which.
  struct SkinnySides {
    explicit SkinnySides(const MatmulCase& c)
        : swapped(c.n < c.m),
          tokens(swapped ? c.n : c.m),
          rows_count(swapped ? c.m : c.n),
          rows_contiguous((swapped ? c.a : c.b) == kOwnVectors) {}
    bool swapped;  // the tokens are B's columns
    int64_t tokens, rows_count;
    bool rows_contiguous;  // of the weights
  };

  // The splits of a row's K are a cluster: there are none where the device runs none as large.
  bool may_split() const { return clusters_.largest() == kSkinnyMostSplits; }

  static bool takes(const MatmulCase& c) {
    // Coordinates of tensor maps are 32-bit, and so are the kernels' rows.
    constexpr int64_t kMost = (int64_t{1} << 31) - 512;
    const SkinnySides sides(c);
    return !c.split_sums && !c.sums_rows() && c.input == c.output && c.batch_dims == 0 &&
           c.only_bias() && c.a_mappable && c.b_mappable &&
           (sides.swapped ? c.b : c.a) == kKVectors && sides.tokens <= kSkinnyMostTokens &&
           sides.rows_count <= kMost && c.k >= kSkinnyBlockK && c.k <= kMost;
  }

  struct RememberedLayers {
    MatmulCase problem;
    SkinnyLayers sizes;
    MatmulPlan plan;
  };
  static constexpr size_t kRememberedLayers = 31;

  MatmulPlan planned(const MatmulCase& c, const SkinnyLayers& sizes) const {
    for (;;) {
      MatmulConfigs configs(terms_, c.batch_invariant, kNoPlanner);
      configs.from(this);
      offer_all(c, SkinnySides(c), sizes, configs);
      const MatmulPlan plan = configs.best();
      if (plan.kernels == nullptr || has_capacity(plan)) return plan;
    }
  }

  void offer_all(const MatmulCase& c, const SkinnySides& sides, const SkinnyLayers& layers,
                 MatmulConfigs& out) const {
    offer_streamed(c, sides, layers, out);
    const int64_t k_blocks = ceil_div(c.k, kSkinnyBlockK);
    const int64_t most = may_split() ? std::min(kSkinnyMostSplits, k_blocks / 2) : 1;
    for (int32_t splits = 1; splits <= std::max<int64_t>(most, 1); ++splits) {
      if (c.batch_invariant && splits != c.k_parts) continue;
      if (sides.rows_contiguous) {
        for (const int32_t rows : {64, 128, 192}) offer(c, sides, layers, {rows, splits}, out);
        if (splits == 1) offer_uneven(c, sides, layers, out);
        continue;
      }
      // Two parts of K gain by shorter tiles that have a multiprocessor each (2048 x 8192 by 32 and
      // 64 rows, H200: 1 token 11.0, 11.6 us, 32 tokens 12.0, 14.8).
      constexpr int64_t kWaves = 3, kLeastRows = 40, kLeastOfPairs = 24, kMostRows = 128;
      const int64_t step = layers.gated ? 16 : 8;
      const int64_t slots = device_.multiprocessors / splits;
      const int64_t first = ceil_div(sides.rows_count, slots * kMostRows);
      // All clusters of four parts run at a time by 64 rows, and shorter tiles may be too many.
      const int64_t end = c.k_parts > 2 ? first : first + kWaves;
      for (int64_t waves = first; waves < end; ++waves) {
        int64_t rows = ceil_div(ceil_div(sides.rows_count, slots * waves), step) * step;
        // The last tile of each layer may be a small one.
        while (rows <= kMostRows && layers.all_tiles(rows) > slots * waves) rows += step;
        const int64_t least = c.k_parts == 2 && waves == first ? kLeastOfPairs : kLeastRows;
        if (rows >= least && rows <= kMostRows && rows != 64) {
          offer(c, sides, layers, {static_cast<int32_t>(rows), splits}, out);
        }
      }
      offer(c, sides, layers, {64, splits}, out);
    }
  }

  // Where the weights' rows are contiguous, and whole lines. Blocks at different k would each read
  // the lines that two tiles have in common (32x14192x8000 NN, H200: 88.6 us, in whole tiles 63.7).
  void offer_streamed(const MatmulCase& c, const SkinnySides& sides, const SkinnyLayers& layers,
                      MatmulConfigs& out) const {
    const bool lines = sides.swapped ? c.a_lines : c.b_lines;
    if (!lines || layers.gated || c.k_parts > 1) return;
    // Of 64 tokens pairs take less time: 10240x8192 44.2 us, alone 46.0 by 128 rows. Blocks with at
    // least a tile's worth of K never wait for the sums that they continue (in order, H200, 64
    // tokens 44.9 -> 43.8 us); of fewer tiles they do (16x6144x4096 14.2, 16.8).
    const bool pairs = sides.tokens > kMostAlone;
    const SkinnyStream stream = pairs ? SkinnyStream::kPairs : SkinnyStream::kAlone;
    for (const int32_t rows : {64, 128}) {
      SkinnyTiles tile{rows, 1, stream};
      tile.in_order = layers.all_tiles(rows) >= device_.multiprocessors;
      if (tile.in_order || !c.batch_invariant) offer(c, sides, layers, tile, out);
    }
  }

  // Pairs of tiles of 64 and of 32 rows, one for each port of two multiprocessors, where tiles of
  // 64 rows would be two on some of them, and few ports would have no pair (H200, NN: 16 x 6144 x
  // 4096 14.3 us, by 64 rows 17.1, streamed, which is not in order, 14.0; 8 x 5120 x 5120 17.1,
  // 15.3).
  void offer_uneven(const MatmulCase& c, const SkinnySides& sides, const SkinnyLayers& layers,
                    MatmulConfigs& out) const {
    const bool lines = sides.swapped ? c.a_lines : c.b_lines;
    const int64_t ports = device_.multiprocessors / 2;
    if (!c.batch_invariant || !lines || layers.count != 1 || !may_split()) return;
    const int64_t pairs = ceil_div(sides.rows_count, kUnevenRows);
    if (sides.tokens > kMostAlone || pairs > ports || 8 * pairs < 7 * ports) return;
    SkinnyTiles tile{64, 1};
    tile.uneven = true;
    offer(c, sides, layers, tile, out);
  }

  void offer(const MatmulCase& c, const SkinnySides& sides, const SkinnyLayers& layers,
             SkinnyTiles tile, MatmulConfigs& out) const {
    const int64_t rows = tile.rows, splits = tile.splits;
    const SkinnyRow* row = nullptr;  // the smallest that fits
    for (const SkinnyRow& each : rows_) {
      if (each.math != c.math || each.rows_contiguous != sides.rows_contiguous) continue;
      if (each.gated != layers.gated || each.stream != tile.stream) continue;
      if (tile.streamed() && each.rows != tile.rows) continue;
      if (each.tokens < sides.tokens || each.rows < tile.rows) continue;
      if (row != nullptr && each.tokens * each.rows >= row->tokens * row->rows) continue;
      row = &each;
    }
    if (row == nullptr) return;
    SkinnyPlan chosen{};
    chosen.row = row;
    chosen.tiles = tile;
    chosen.swapped = sides.swapped;
    const int64_t tiles = tile.uneven ? 2 * ceil_div(sides.rows_count, kUnevenRows)
                                      : layers.all_tiles(rows * tile.together());
    const int64_t multiprocessors = device_.multiprocessors / tile.together();
    const int64_t tile_k_blocks = ceil_div(c.k, kSkinnyBlockK);
    if (tile.streamed()) {
      // Nothing is gained where the tiles fill all waves, and of few tiles clusters split K
      // (16x4096x14336 NN, H200: in pairs 28.6 us, 30.1). The kernel's numbers have 32 bits.
      const int64_t units = tiles * tile_k_blocks;
      if (tiles % multiprocessors == 0 || 2 * tiles <= multiprocessors) return;
      if (units < kLeastStreamed * multiprocessors) return;
      if ((units + 1) * multiprocessors >= int64_t{1} << 31) return;
    }
    // Of a given number of parts the clusters may be too many to run at a time, but by two on each
    // multiprocessor.
    const bool many = c.k_parts > 1 && tiles > clusters_at_once(multiprocessors, splits);
    if (!fit_stages(*row, c.k, many ? kFewStages : kEnoughStages, chosen)) return;
    chosen.tiles_count = static_cast<int32_t>(tiles);
    chosen.blocks = splits > 1        ? tiles * splits
                    : tile.streamed() ? multiprocessors * tile.together()
                                      : std::min<int64_t>(tiles, multiprocessors);

    Work work;
    work.bytes = 2 * (static_cast<double>(c.m) * c.k + static_cast<double>(c.k) * c.n +
                      static_cast<double>(c.m) * c.n);
    // So many they run at a time; of few stages, though, it takes as long as in two turns
    // (2048 x 8192, H200: 1 to 32 tokens 10.6 to 11.3 us, 48 14.7).
    const bool beside = many && chosen.shared <= kSkinnyHalfShared && chosen.stages > kFewStages;
    const int64_t at_once = clusters_at_once(multiprocessors, splits);
    const auto rounds = static_cast<double>(ceil_div(tiles, beside ? 2 * at_once : at_once));
    // Of the busiest block: k blocks, and tiles, whole or in part.
    const double k_blocks = tile.streamed()
                                ? static_cast<double>(tiles * tile_k_blocks) / multiprocessors
                                : rounds * static_cast<double>(ceil_div(tile_k_blocks, splits));
    const int64_t most_tiles = tiles / multiprocessors + 2;
    work.tiles = tile.streamed() ? static_cast<double>(most_tiles) : rounds;
    // (Of an uneven pair the half.)
    const int64_t loaded_rows = tile.uneven ? kUnevenRows / 2 : stage_rows(*row, tile.rows);
    work.once_bytes = loaded_rows * k_blocks * kSkinnyBlockK * 2;
    // Two multiprocessors share a port (Terms::port_bytes_per_cycle). Where both have as many
    // blocks as any, the memory waits for the ports of such (16x6144x4096 NN, H200: 96 blocks of 64
    // rows 17.6 us, 64 blocks of 192 rows and half of K 14.6). Of several tiles of one block, one
    // after another, less is seen.
    const int64_t ports = multiprocessors / 2;
    if (tiles * splits > ports && (rounds == 1 || splits > 1)) {
      const double weights = 2 * static_cast<double>(sides.rows_count) * static_cast<double>(c.k);
      work.bytes += std::max(2 * work.once_bytes * static_cast<double>(ports) - weights, 0.0);
    }
    // Stretches of rows that do not begin at lines lie across two (H200: 1.1 to 1.7 times as long).
    const int64_t quarters = (sides.swapped ? c.a_lines : c.b_lines) ? 4 : 5;
    work.once_bytes = work.once_bytes * static_cast<double>(quarters) / 4;
    work.narrow = k_blocks * 8 * ceil_div(rows, int64_t{64}) * row->tokens / 8;
    // Loads hide most of it (64 x 4096 x 14336 NN in one chain, H200: 32.0 us, 44.3 with all).
    const bool is_long = c.k >= kSkinnyLongK && splits == 1 && rounds == 1;
    if (c.batch_invariant && is_long && !tile.streamed()) work.narrow /= 6;
    work.l2_bytes = row->tokens * k_blocks * kSkinnyBlockK * quarters / 2;
    work.values = work.tiles * static_cast<double>(row->rows * row->tokens);
    // That a tile has at most, if streamed: as one of its own.
    const int64_t parts = tile.streamed() ? ceil_div(multiprocessors, tiles) + 1 : splits;
    work.handshakes = tile.streamed() ? static_cast<double>(parts) : splits > 1 ? 1 : 0;
    const int64_t sums_bytes = (parts - 1) * tile.rows * row->tokens * 4 / splits;
    work.sums_bytes = static_cast<double>(sums_bytes);
    MatmulPlan plan;
    plan.set(chosen);
    out.offer(plan, work);
  }

  static int64_t stage_rows(const SkinnyRow& row, int64_t rows) {
    return row.rows_contiguous ? ceil_div(rows, int64_t{64}) * 64 : rows;
  }

  // As many stages as fit beside the next kernel's block; where those are few, or a block runs for
  // so long that an early start of the next kernel is nothing to it, as fit at all.
  static bool fit_stages(const SkinnyRow& row, int64_t k, int64_t enough, SkinnyPlan& plan) {
    const int64_t rows = plan.tiles.rows, splits = plan.tiles.splits;
    const int64_t stage = (stage_rows(row, rows) + row.tokens) * kSkinnyPanelBytes * 2;
    const int64_t halves = row.gated ? 2 : 1;
    const int64_t groups = row.rows / 64 / halves * row.tokens / 8;
    const int64_t parts =
        splits > 1 ? ceil_div(groups, splits) * splits * halves * kSkinnyGroupBytes : 0;
    // A stage's products read as many rows as the kernel has: in the last stage, past its end.
    const int64_t beyond = row.rows_contiguous
                               ? (row.rows - stage_rows(row, rows)) * kSkinnyPanelBytes * 2
                               : (row.rows - rows) * kSkinnyPanelBytes;
    const int64_t rest = std::max(parts, beyond);
    int64_t stages = (kSkinnyHalfShared - rest) / stage;
    if (stages < enough || rows * k / splits * 2 >= kSkinnyLongBytes) {
      stages = (row.kernel->entry().dynamic_shared - rest) / stage;
    }
    if (stages < 2) return false;
    stages = std::min(stages, kSkinnyMostStages);
    plan.stages = static_cast<int32_t>(stages);
    plan.ring_bytes = static_cast<int32_t>(stages * stage);
    plan.shared = static_cast<int32_t>(stages * stage + rest);
    return true;
  }

  void launch_layers(const SkinnyPlan& chosen, const FusedLayer* const* layers,
                     const SkinnyLayers& sizes) const {
    const SkinnyRow& row = *chosen.row;
    const bool swapped = chosen.swapped;
    const MatmulProblem& p = layers[0]->problem;
    const int64_t tokens = swapped ? p.n : p.m;
    Sm90SkinnyParams params{};
    describe(params.tokens, row, swapped ? layers[0]->operands.b : layers[0]->operands.a, p.k,
             tokens, swapped ? p.b_stride_n : p.a_stride_m, kSkinnyPanelBytes / 2, row.tokens);
    params.pairs = 1;
    int64_t first_tile = 0;
    for (int i = 0; i < sizes.count; ++i) {
      const MatmulProblem& own = layers[i]->problem;
      const MatmulOperands& operands = layers[i]->operands;
      const char* weights = swapped ? operands.a : operands.b;
      const int64_t row_stride = swapped ? own.a_stride_m : own.b_stride_n;
      const int64_t k_stride = swapped ? own.a_stride_k : own.b_stride_k;
      if (row.rows_contiguous) {
        describe(params.weights[i], row, weights, sizes.rows[i], own.k, k_stride, 64,
                 kSkinnyBlockK);
      } else {
        describe(params.weights[i], row, weights, own.k, sizes.rows[i], row_stride,
                 kSkinnyPanelBytes / 2, chosen.tiles.rows / (sizes.gated ? 2 : 1));
      }
      if (i >= sizes.outputs()) continue;
      Sm90SkinnyLayer& layer = params.layers[i];
      layer.out = operands.c;
      layer.bias = operands.bias;
      layer.out_stride_row = swapped ? own.n : 1;
      layer.out_stride_token = swapped ? 1 : own.n;
      layer.bias_stride_row = swapped ? 0 : operands.bias_stride;
      layer.bias_stride_token = swapped ? operands.bias_stride : 0;
      layer.rows_count = static_cast<int>(sizes.rows[i]);
      layer.first_tile = static_cast<int>(first_tile);
      first_tile += sizes.tiles(i, chosen.tiles.rows * chosen.tiles.together());
      if (own.n % 2 != 0 || reinterpret_cast<uintptr_t>(operands.c) % 4 != 0) params.pairs = 0;
    }
    if (chosen.tiles.uneven) {
      describe(params.weights[1], row, swapped ? layers[0]->operands.a : layers[0]->operands.b,
               sizes.rows[0], p.k, swapped ? p.a_stride_k : p.b_stride_k, 32, kSkinnyBlockK);
      params.uneven = 1;
    }
    params.layers_count = sizes.outputs();
    params.tokens_count = static_cast<int>(tokens);
    params.k = static_cast<int>(p.k);
    params.rows = chosen.tiles.rows;
    params.tiles = chosen.tiles_count;
    params.splits = chosen.tiles.in_order ? 0 : chosen.tiles.splits;
    params.stages = chosen.stages;
    params.prefetched = chosen.stages;
    params.ring_bytes = chosen.ring_bytes;
    params.activation = p.activation;
    params.curve = kActivationCurves[p.activation];
    std::optional<Workspace> partial;
    std::optional<ZeroCounters> counters;
    if (chosen.tiles.streamed()) {
      const int64_t tile_bytes = row.rows * row.tokens * int64_t{sizeof(float)};
      partial.emplace(device_, 2 * chosen.blocks * tile_bytes);
      counters.emplace(device_, chosen.blocks);
      params.polls = kStreamPolls;
      params.partial = reinterpret_cast<float*>(partial->data());
      params.counters = counters->data();
    }
    const int64_t cluster = chosen.tiles.uneven ? 2 : chosen.tiles.splits * chosen.tiles.together();
    torch_cubin::launch(*row.kernel, {chosen.blocks, 1, 1, cluster, chosen.shared}, device_,
                        params);
  }

  // A map of `rows` rows of `columns` elements of 16 bits, `stride` elements apart.
  void describe(Sm90SkinnyMap& out, const SkinnyRow& row, const char* data, int64_t columns,
                int64_t rows, int64_t stride, int64_t box_columns, int64_t box_rows) const {
    // The stride of a lone row is never used, but the driver wants a whole number of vectors.
    const int64_t step =
        rows == 1 ? ceil_div(columns * 2, kVectorBytes) * kVectorBytes : stride * 2;
    const MapType type = row.math == kMathBFloat16 ? MapType::kBFloat16 : MapType::kFloat16;
    static_assert(sizeof(out) == kTensorMapBytes, "what the driver encodes");
    encode_tiled_map(&out, data, type, MapSwizzle::k128Bytes,
                     {{static_cast<uint64_t>(columns), 2, static_cast<uint32_t>(box_columns)},
                      {static_cast<uint64_t>(rows), static_cast<uint64_t>(step),
                       static_cast<uint32_t>(box_rows)}},
                     device_.index, MapL2Promotion::k128Bytes);
  }

  const Device& device_;
  const Terms terms_ = terms_of(device_);
  const MatmulConfigs::Planner kNoPlanner = {};  // nothing is rewritten here
  std::vector<SkinnyRow> rows_;
  ClusterCapacity clusters_{kSkinnyMostSplits};
};

const MatmulBackendOf<Sm90Skinny, Sm90SkinnyParams> g_sm90_skinny("matmul/sm90_skinny",
                                                                  {"sm90_skinny",
                                                                   "sm90_skinny_gated"});

struct SkinnyTable {
  explicit SkinnyTable(const Device& device) {
    FamilyKernels("matmul", device)
        .for_each_backend<MatmulBackend>([&](const MatmulBackend& backend, const auto& entries) {
          if (&backend == &g_sm90_skinny) {
            kernels = std::make_unique<Sm90Skinny>(device, entries);
          }
        });
  }
  std::unique_ptr<Sm90Skinny> kernels;  // null: none for this device
};

const Sm90Skinny* skinny_kernels(const Device& device) {
  static DeviceTables<SkinnyTable> tables;
  return tables.get(device).kernels.get();
}

bool run_skinny(const Device& device, const FusedLayer* const* layers, const SkinnyLayers& sizes) {
  const Sm90Skinny* const kernels = skinny_kernels(device);
  return kernels != nullptr && kernels->run(layers, sizes);
}

}  // namespace

bool has_skinny_kernels(const Device& device) { return skinny_kernels(device) != nullptr; }

bool run_skinny_layers(const Device& device, const FusedLayer* layers, int count) {
  const FusedLayer* all[kSkinnyLayers];
  SkinnyLayers sizes{{}, count, false};
  for (int i = 0; i < count; ++i) {
    all[i] = &layers[i];
    sizes.rows[i] = layers[i].problem.n;
  }
  return run_skinny(device, all, sizes);
}

bool run_skinny_gated(const Device& device, const FusedLayer& gate, const FusedLayer& up) {
  const FusedLayer* const both[] = {&gate, &up};
  return run_skinny(device, both, {{gate.problem.n, up.problem.n}, 2, true});
}

}  // namespace torch_cubin
