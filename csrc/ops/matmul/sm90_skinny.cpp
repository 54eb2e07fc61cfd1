// The backend of csrc/kernels/matmul/sm90_skinny.cu: products with at most 64 rows of A, or columns
// of B, on Hopper. The small operand is called the tokens, the other one the weights.
#include <algorithm>
#include <limits>

#include "kernels/matmul/sm90_skinny_params.h"
#include "ops/common/cluster_capacity.h"
#include "ops/common/launch.h"
#include "ops/matmul/backend.h"
#include "runtime/tensor_map.h"

namespace torch_cubin {
namespace {

constexpr int64_t kSkinnyBlockK = 128;           // of the kernels
constexpr int64_t kSkinnyPanelBytes = 128;       // of a row in shared memory
constexpr int64_t kSkinnyGroupBytes = 128 * 16;  // the sums of 64 rows x 8 tokens
constexpr int64_t kSkinnyMostStages = 16;
constexpr int64_t kBeside = 4096;         // bytes of shared memory, at least as many as are static
constexpr int64_t kSkinnyMostSplits = 8;  // blocks of a cluster, on every GPU
// Dynamic shared memory of a block that has half a multiprocessor, beside its static kilobyte: the
// next kernel's blocks then fit while this one's are running.
constexpr int64_t kSkinnyHalfShared = 113 * 1024 - 1024;
// Bytes of the weights that keep a block busy for long (15 us on the H200).
constexpr int64_t kSkinnyLongBytes = int64_t{1} << 20;
// Share of the memory's peak that the kernels reach, the bytes a cycle that one multiprocessor
// takes at most; fitted to timings on the H200.
constexpr double kSkinnyMemoryShare = 0.9;
constexpr double kSkinnyMultiprocessorRate = 20;
// Overheads outside these bounds, fitted so that times compare with those of other kernels
// (sm90.cpp): us, and for each split more, which joins the sums of 32 tokens.
constexpr double kSkinnyShareToCompare = 0.74, kSkinnyMore = 0.6, kSkinnyAlone = 1.5,
                 kSkinnySplit = 0.1;

// How K and the weights' rows are divided: a function of them alone, so that the order in which
// K is added up does not depend on the number of tokens. The rule is what sweeps on the H200 left
// of many choices (benchmarks/sm90/bench_skinny.py).
struct SkinnyTiles {
  int32_t rows, splits;
};

SkinnyTiles skinny_tiles(int64_t rows_count, int64_t k, bool rows_contiguous, bool may_split,
                         int64_t multiprocessors) {
  const int64_t k_blocks = may_split ? ceil_div(k, kSkinnyBlockK) : 1;
  if (rows_contiguous) {
    // Whole lines of 64 rows: others would be read twice. A cluster computes one tile.
    // A short K gains less by a split, which costs the same.
    constexpr double kLongK = 32;
    const double long_k = std::min(1.0, static_cast<double>(ceil_div(k, kSkinnyBlockK)) / kLongK);
    SkinnyTiles best = {64, 1};
    double least = std::numeric_limits<double>::infinity();
    for (int32_t splits = 1; splits <= 4; ++splits) {
      for (const int32_t rows : {64, 192}) {
        const int64_t blocks = ceil_div(rows_count, rows) * splits;
        if (splits > 1 && (blocks > multiprocessors || splits * 2 > k_blocks)) continue;
        const double cost =
            static_cast<double>(ceil_div(blocks, multiprocessors)) * rows / splits * long_k +
            6.0 * splits;
        if (cost < least) {
          least = cost;
          best = {rows, splits};
        }
      }
    }
    return best;
  }
  // As many tiles as multiprocessors, or a whole multiple.
  constexpr int64_t kMostRows = 112, kLeastRows = 48;
  const int64_t waves = ceil_div(rows_count, multiprocessors * kMostRows);
  int64_t rows = ceil_div(rows_count, multiprocessors * waves * 8) * 8;
  if (!may_split) return {static_cast<int32_t>(rows), 1};
  int64_t splits = 1;
  if (rows < kLeastRows && k_blocks >= 4) {
    splits = 2;
    rows = ceil_div(rows_count, multiprocessors / 2 * 8) * 8;
  }
  if (rows < kLeastRows && k_blocks >= 6) {
    rows = 64;
    const int64_t most = std::max<int64_t>(1, multiprocessors / ceil_div(rows_count, rows));
    splits = std::min({std::max<int64_t>(3, k_blocks / 8), kSkinnyMostSplits, most});
  }
  return {static_cast<int32_t>(std::max(rows, kLeastRows)), static_cast<int32_t>(splits)};
}

// One entry of the catalog.
struct SkinnyRow {
  explicit SkinnyRow(PackageKernel& kernel) : kernel(&kernel) {
    const KernelFields fields(kernel);
    constexpr const char* kMaths[] = {"float16", "bfloat16"};
    constexpr const char* kLayouts[] = {"nt", "nn"};
    constexpr Math kMathOf[] = {kMathFloat16, kMathBFloat16};
    math = kMathOf[fields.index("math", kMaths)];
    rows_contiguous = fields.index("layout", kLayouts) == 1;
    int64_t tile[3];
    fields.triple("tile", 8, tile);
    fixed_cycles = fields.object("cost").number("fixed", 0);
    tokens = tile[0];
    rows = tile[1];
    if (tokens > 64 || tokens % 8 != 0 || rows % 64 != 0 || tile[2] != kSkinnyBlockK) {
      fields.refuse("tile", "at most 64 tokens, whole blocks of 64 rows, and 128 of K");
    }
  }

  PackageKernel* kernel;
  Math math;
  bool rows_contiguous;
  int64_t tokens, rows;  // at most
  double fixed_cycles;   // of a launch: its start and its end
};

// What a launch needs besides the problem.
struct SkinnyPlan {
  const SkinnyRow* row;
  bool swapped;  // the tokens are B's columns
  SkinnyTiles tiles;
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

  MatmulPlan plan(const MatmulCase& c) const override {
    if (!takes(c)) return {};
    const SkinnySides sides(c);
    return plan_with(c, sides,
                     skinny_tiles(sides.rows_count, c.k, sides.rows_contiguous, may_split(c),
                                  device_.multiprocessors));
  }

  // The tiles of the rule, and others near them.
  void configs(const MatmulCase& c, std::vector<MatmulPlan>& out) const override {
    if (!takes(c)) return;
    const SkinnySides sides(c);
    const int64_t multiprocessors = device_.multiprocessors;
    const int64_t k_blocks = ceil_div(c.k, kSkinnyBlockK);
    std::vector<SkinnyTiles> tiles = {
        skinny_tiles(sides.rows_count, c.k, sides.rows_contiguous, may_split(c), multiprocessors)};
    if (!may_split(c)) {
      out.push_back(plan_with(c, sides, tiles[0]));
      return;
    }
    const auto add = [&](int64_t rows, int64_t splits) {
      const SkinnyTiles each = {static_cast<int32_t>(rows), static_cast<int32_t>(splits)};
      for (const SkinnyTiles& known : tiles) {
        if (known.rows == each.rows && known.splits == each.splits) return;
      }
      tiles.push_back(each);
    };
    for (int64_t splits = 1; splits <= kSkinnyMostSplits && splits * 2 <= k_blocks; ++splits) {
      if (sides.rows_contiguous) {
        add(64, splits);
        add(128, splits);
        add(192, splits);
        continue;
      }
      for (int64_t waves = 1; waves <= 3; ++waves) {
        const int64_t slots = multiprocessors / splits * waves;
        const int64_t rows = ceil_div(ceil_div(sides.rows_count, slots), int64_t{8}) * 8;
        if (rows >= 40 && rows <= 128) add(rows, splits);
      }
      add(64, splits);
    }
    for (const SkinnyTiles& each : tiles) out.push_back(plan_with(c, sides, each));
  }

  bool has_capacity(const MatmulPlan& plan) const override {
    const auto chosen = plan.get<SkinnyPlan>();
    return chosen.tiles.splits == 1 ||
           clusters_.ask(*rows_.front().kernel, device_, device_.shared_optin - kBeside) ==
               kSkinnyMostSplits;
  }

  std::string name(const MatmulPlan& plan) const override {
    const auto chosen = plan.get<SkinnyPlan>();
    return "sm90_skinny " + std::to_string(chosen.tiles.rows) + " rows " +
           std::to_string(chosen.tiles.splits) + " splits";
  }

  void launch(const MatmulPlan& plan, const MatmulProblem& p,
              const MatmulOperands& operands) const override {
    const auto chosen = plan.get<SkinnyPlan>();
    const SkinnyRow& row = *chosen.row;
    const bool swapped = chosen.swapped;
    Sm90SkinnyParams params;
    const int64_t tokens = swapped ? p.n : p.m, rows_count = swapped ? p.m : p.n;
    const char* weights = swapped ? operands.a : operands.b;
    const int64_t row_stride = swapped ? p.a_stride_m : p.b_stride_n;
    const int64_t k_stride = swapped ? p.a_stride_k : p.b_stride_k;
    if (row.rows_contiguous) {
      describe(params.weights, row, weights, rows_count, p.k, k_stride, 64, kSkinnyBlockK);
    } else {
      describe(params.weights, row, weights, p.k, rows_count, row_stride, kSkinnyPanelBytes / 2,
               chosen.tiles.rows);
    }
    describe(params.tokens, row, swapped ? operands.b : operands.a, p.k, tokens,
             swapped ? p.b_stride_n : p.a_stride_m, kSkinnyPanelBytes / 2, row.tokens);
    params.out = operands.c;
    params.bias = operands.bias;
    params.out_stride_row = swapped ? p.n : 1;
    params.out_stride_token = swapped ? 1 : p.n;
    params.bias_stride_row = swapped ? 0 : operands.bias_stride;
    params.bias_stride_token = swapped ? operands.bias_stride : 0;
    params.tokens_count = static_cast<int>(tokens);
    params.rows_count = static_cast<int>(rows_count);
    params.k = static_cast<int>(p.k);
    params.rows = chosen.tiles.rows;
    params.tiles = static_cast<int>(ceil_div(rows_count, int64_t{chosen.tiles.rows}));
    params.splits = chosen.tiles.splits;
    params.stages = chosen.stages;
    params.prefetched = chosen.stages;
    params.pairs = p.n % 2 == 0 && reinterpret_cast<uintptr_t>(operands.c) % 4 == 0;
    params.ring_bytes = chosen.ring_bytes;
    torch_cubin::launch(*row.kernel, {chosen.blocks, 1, 1, chosen.tiles.splits, chosen.shared},
                        device_, params);
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
  bool may_split(const MatmulCase& c) const {
    return !c.batch_invariant && clusters_.largest() == kSkinnyMostSplits;
  }

  static bool takes(const MatmulCase& c) {
    // Coordinates of tensor maps are 32-bit, and so are the kernels' rows.
    constexpr int64_t kMost = (int64_t{1} << 31) - 512;
    const SkinnySides sides(c);
    return !c.split_sums && !c.sums_rows() && c.input == c.output && c.a_scales == Scales::kNone &&
           c.b_scales == Scales::kNone && c.batch_dims == 0 && c.only_bias() && c.a_mappable &&
           c.b_mappable && (sides.swapped ? c.b : c.a) == kKVectors && sides.tokens <= 64 &&
           sides.rows_count <= kMost && c.k >= kSkinnyBlockK && c.k <= kMost;
  }

  MatmulPlan plan_with(const MatmulCase& c, const SkinnySides& sides, SkinnyTiles tile) const {
    MatmulPlan plan;
    const SkinnyRow* row = nullptr;  // the smallest that fits
    for (const SkinnyRow& each : rows_) {
      if (each.math != c.math || each.rows_contiguous != sides.rows_contiguous) continue;
      if (each.tokens < sides.tokens || each.rows < tile.rows) continue;
      if (row != nullptr && each.tokens * each.rows >= row->tokens * row->rows) continue;
      row = &each;
    }
    if (row == nullptr) return plan;
    SkinnyPlan chosen{};
    chosen.row = row;
    chosen.tiles = tile;
    chosen.swapped = sides.swapped;
    if (!fit_stages(*row, c.k, chosen)) return plan;

    const int64_t tiles = ceil_div(sides.rows_count, int64_t{tile.rows});
    const int64_t splits = tile.splits;
    chosen.blocks = splits > 1 ? tiles * splits : std::min<int64_t>(tiles, device_.multiprocessors);

    const double bytes = 2.0 * (static_cast<double>(c.m) * c.k + static_cast<double>(c.k) * c.n +
                                static_cast<double>(c.m) * c.n);
    const double rounds = static_cast<double>(ceil_div(tiles * splits, device_.multiprocessors));
    const double of_one = rounds * stage_rows(*row, tile.rows) *
                          static_cast<double>(ceil_div(ceil_div(c.k, kSkinnyBlockK), splits)) *
                          kSkinnyBlockK * 2;
    const double cycles = std::max(bytes / (device_.bytes_per_cycle * kSkinnyMemoryShare),
                                   of_one / kSkinnyMultiprocessorRate) +
                          row->fixed_cycles;
    plan.microseconds = kSkinnyShareToCompare * cycles / device_.cycles_per_microsecond +
                        (splits > 1 ? kSkinnyMore : kSkinnyAlone) +
                        kSkinnySplit * static_cast<double>(splits - 1) *
                            (static_cast<double>(sides.tokens) / 32 + 0.5);
    plan.set(chosen);
    return plan;
  }

  static int64_t stage_rows(const SkinnyRow& row, int64_t rows) {
    return row.rows_contiguous ? ceil_div(rows, int64_t{64}) * 64 : rows;
  }

  // As many stages as fit beside the next kernel's block; where those are few, or a block runs for
  // so long that an early start of the next kernel is nothing to it, as fit at all.
  static bool fit_stages(const SkinnyRow& row, int64_t k, SkinnyPlan& plan) {
    const int64_t rows = plan.tiles.rows, splits = plan.tiles.splits;
    const int64_t stage = (stage_rows(row, rows) + row.tokens) * kSkinnyPanelBytes * 2;
    const int64_t groups = row.rows / 64 * row.tokens / 8;
    const int64_t parts = splits > 1 ? ceil_div(groups, splits) * splits * kSkinnyGroupBytes : 0;
    // A stage's products read as many rows as the kernel has: in the last stage, past its end.
    const int64_t beyond = row.rows_contiguous
                               ? (row.rows - stage_rows(row, rows)) * kSkinnyPanelBytes * 2
                               : (row.rows - rows) * kSkinnyPanelBytes;
    const int64_t rest = std::max(parts, beyond);
    constexpr int64_t kEnoughStages = 4;
    int64_t stages = (kSkinnyHalfShared - rest) / stage;
    if (stages < kEnoughStages || rows * k / splits * 2 >= kSkinnyLongBytes) {
      stages = (row.kernel->entry().dynamic_shared - rest) / stage;
    }
    if (stages < 2) return false;
    stages = std::min(stages, kSkinnyMostStages);
    plan.stages = static_cast<int32_t>(stages);
    plan.ring_bytes = static_cast<int32_t>(stages * stage);
    plan.shared = static_cast<int32_t>(stages * stage + rest);
    return true;
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
  std::vector<SkinnyRow> rows_;
  ClusterCapacity clusters_{kSkinnyMostSplits};
};

class Sm90SkinnyBackend : public MatmulBackendOf<Sm90Skinny> {
 public:
  Sm90SkinnyBackend() : MatmulBackendOf({"sm90_skinny"}) {}

  void check(PackageKernel& kernel) const override {
    check_params(kernel.entry(), "matmul/sm90_skinny", sizeof(Sm90SkinnyParams));
    SkinnyRow{kernel};  // throws for a field that is wrong
  }
};

const Sm90SkinnyBackend g_sm90_skinny;

}  // namespace
}  // namespace torch_cubin
