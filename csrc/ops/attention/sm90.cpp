// The seam of csrc/kernels/attention/sm90.cu: attention forward on Hopper, of 16-bit types. Masks that are
// added, and few queries with many keys, are the portable kernels'. Packed sequences take sm90_order.cu
// before it, boolean masks sm90_mask.cu.
#include <algorithm>
#include <cmath>
#include <optional>

#include "kernels/attention/sm90_mask_params.h"
#include "ops/attention/sm90_deal.h"
#include "ops/attention/sm90_map.h"
#include "ops/common/launch.h"

namespace torch_cubin {
namespace {

constexpr int64_t kQueryRows = 64;  // of a box: those of a warpgroup
constexpr int64_t kMostTiles = (int64_t{1} << 31) - 1 - kSm90MostBlocks;

// Of packed sequences: queries whose tiles are ordered by length, and so share the L2 cache.
constexpr int kPackedRowsTogether = 32768;
constexpr const char* kGeneralKind = "sm90_general";
constexpr const char* kMaskedKind = "sm90_masked";
constexpr const char* kOrderKind = "sm90_order";
constexpr const char* kMaskKind = "sm90_mask";
constexpr double kLog2e = 1.4426950408889634;

class Sm90Forward : public AttentionForwardKernels {
 public:
  Sm90Forward(const Device& device, const std::vector<PackageKernel*>& kernels)
      : device_(device), blocks_(sm90_blocks(device)) {
    for (PackageKernel* kernel : kernels) {
      const std::string& kind = kernel->entry().kind;
      if (kind == kOrderKind || kind == kMaskKind) {
        (kind == kMaskKind ? mask_ : order_) = kernel;
        continue;
      }
      const AttentionRow row(*kernel, device);
      if (kind != kMaskedKind) rows_[row.dtype][row.variant].push_back(row);
      if (kind != "sm90") masked_[row.dtype].push_back(row);
    }
  }

  ForwardPlan plan(const AttentionCase& problem) const override {
    ForwardPlan plan;
    if (problem.mask == kAddedMask || problem.large_softcap ||
        (problem.mask == kBoolMask && mask_ == nullptr) || (problem.packed && order_ == nullptr) ||
        problem.seqlen_q == 0 || problem.seqlen_k == 0 || problem.head_dim == 0 ||
        problem.head_dim_v == 0) {
      return plan;
    }
    const Sm90Band all = {problem.seqlen_q, problem.seqlen_k, -kNoBound, kNoBound};
    const AttentionRow* row = choose(problem, all, &plan.microseconds);
    if (row != nullptr && problem.packed && problem.batch_invariant) plan.microseconds = 0;
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

  bool clears_rows_of_none() const override { return true; }

 private:
  // The quickest kernel that is wide enough. Null, and infinitely long, where there is none.
  const AttentionRow* choose(const AttentionCase& problem, const Sm90Band& band,
                             double* time) const {
    *time = std::numeric_limits<double>::infinity();
    const AttentionDtype dtype = attention_dtype(problem.dtype);
    if (dtype == kAttendDtypes) return nullptr;
    const bool only_masked = problem.mask == kBoolMask && problem.score_variant == kFull;
    const AttentionRows& rows = only_masked ? masked_[dtype] : rows_[dtype][problem.variant];
    const AttentionRow* fits = narrowest(rows, std::max(problem.head_dim, problem.head_dim_v));
    if (fits == nullptr) return nullptr;
    const AttentionRow* best = nullptr;
    for (const AttentionRow& row : rows) {
      if (row.head_dim != fits->head_dim) continue;
      const int64_t tiles = ceil_div(band.seqlen_q, row.rows) * problem.heads * problem.batch;
      const double own = static_cast<double>(ceil_div(tiles, blocks_)) *
                         sm90_tile_cycles(row, band) / device_.cycles_per_microsecond;
      if (!(own < *time)) continue;
      *time = own;
      best = &row;
    }
    return best;
  }

  void launch_part(const AttentionCase& problem, const FusedOperands& operands,
                   const AttentionParams& all) const {
    const Sm90Lengths lengths = sm90_lengths(all);
    const Sm90Band band = {all.seqlen_q, all.seqlen_k, lengths.first, lengths.last};
    double time;
    const AttentionRow& row = *choose(problem, band, &time);
    const bool packed = problem.packed;
    const Sm90Rows rows(problem, operands);
    const int64_t tiles = rows.tiles(rows.q, row.rows);
    const int64_t heads = packed ? all.heads : int64_t{all.batch} * all.heads;
    if (!check_blocks(tiles * heads, kMostTiles, "tiles of output")) return;
    Sm90AttentionParams params{};
    fill_sm90_params(params, row, all, rows, kQueryRows, row.columns, device_);
    params.logsumexp = all.logsumexp;
    params.tiles = static_cast<int>(tiles);
    params.unit = static_cast<float>(all.scale * kLog2e);
    // Scores that are only multiplied by a positive number keep their order.
    params.has_rule = all.softcap != 0 || all.alibi_slopes != nullptr || !(params.unit > 0) ||
                      !std::isnormal(params.unit);
    if (params.has_rule) params.unit = static_cast<float>(kLog2e);
    std::optional<Workspace> mask;
    if (all.mask != nullptr) params.next = lay_out_mask(all, row, params.mask, mask);
    if (!packed) {
      params.deal = mask ? sm90_heads_together(tiles) : sm90_deal(row, band, tiles, heads, blocks_);
      torch_cubin::launch(*row.kernel, {std::min(blocks_, tiles * heads)}, device_, params);
      return;
    }
    const Sm90TileOrder order(device_, tiles);
    params.out_stride[0] = 0;
    params.order = order.data();
    Sm90OrderParams making{};
    making.tile_rows = static_cast<int>(row.rows);
    making.tile_columns = static_cast<int>(row.columns);
    making.rows_together = kPackedRowsTogether;
    making.logsumexp = all.logsumexp;
    making.logsumexp_head = all.total_q;
    making.rows_of_none[0] =
        sm90_rows_of_none(all.out, all.out_stride, all.heads, all.head_dim_v, false);
    order.make(*order_, device_, all, making);
    torch_cubin::launch(*row.kernel, {std::min(blocks_, tiles * heads)}, device_, params);
  }

  // Launches the kernel that lays out a boolean mask for `row`'s tiles, as many batches, heads and rows
  // as it has. Returns the counter of tiles that it makes 0.
  int* lay_out_mask(const AttentionParams& all, const AttentionRow& row, Sm90MaskTiles& out,
                    std::optional<Workspace>& memory) const {
    const auto size = [&](int dim, int64_t all_of) {
      return all.mask_stride[dim] == 0 ? int64_t{1} : all_of;
    };
    const int64_t batch = size(0, all.batch), heads = size(1, all.heads);
    const int64_t rows = size(2, all.seqlen_q), pairs = batch * heads;
    const int64_t tiles = ceil_div(rows, row.rows), blocks = ceil_div(all.seqlen_k, row.columns);
    const int64_t chunks = ceil_div(blocks, kMaskTileBlocks);
    const int64_t classes = ceil_div(blocks, kMaskWordBlocks) * 4;
    const int64_t line = blocks * 4;  // words
    // The counter, the words, the classes.
    const int64_t words_at = 16, classes_at = words_at + pairs * rows * line * 4;
    memory.emplace(device_, classes_at + pairs * tiles * classes);
    Sm90MaskParams params{};
    params.mask = static_cast<const unsigned char*>(all.mask);
    params.next = reinterpret_cast<int*>(memory->data());
    params.words = reinterpret_cast<unsigned*>(memory->data() + words_at);
    params.classes = reinterpret_cast<unsigned char*>(memory->data() + classes_at);
    std::copy_n(all.mask_stride, 4, params.stride);
    params.heads = static_cast<int>(heads);
    params.rows = static_cast<int>(rows);
    params.columns = all.seqlen_k;
    params.tile_rows = static_cast<int>(row.rows);
    params.tile_columns = static_cast<int>(row.columns);
    params.tiles = static_cast<int>(tiles);
    params.blocks = static_cast<int>(blocks);
    params.chunks = static_cast<int>(chunks);
    params.classes_of_tile = static_cast<int>(classes);
    torch_cubin::launch(*mask_, {pairs * tiles * chunks}, device_, params);
    out.words = params.words;
    out.classes = reinterpret_cast<const unsigned*>(params.classes);
    const int64_t class_line = classes / 4;
    out.word_stride[0] = batch == 1 ? 0 : heads * rows * line;
    out.word_stride[1] = heads == 1 ? 0 : rows * line;
    out.word_stride[2] = rows == 1 ? 0 : line;
    out.class_stride[0] = batch == 1 ? 0 : heads * tiles * class_line;
    out.class_stride[1] = heads == 1 ? 0 : tiles * class_line;
    out.class_stride[2] = rows == 1 ? 0 : class_line;
    return params.next;
  }

  const Device& device_;
  int64_t blocks_;
  AttentionRows rows_[kAttendDtypes][kAttentionVariants];
  AttentionRows masked_[kAttendDtypes];  // for calls with a boolean mask and no other option
  PackageKernel* order_ = nullptr;
  PackageKernel* mask_ = nullptr;
};

class Sm90AttentionSeam : public AttentionSeam {
 public:
  Sm90AttentionSeam() : AttentionSeam({"sm90", kGeneralKind, kMaskedKind, kOrderKind, kMaskKind}) {}

  void check(PackageKernel& kernel) const override {
    if (kernel.entry().kind == kOrderKind) {
      check_params(kernel.entry(), "attention/sm90_order", sizeof(Sm90OrderParams));
      return;
    }
    if (kernel.entry().kind == kMaskKind) {
      check_params(kernel.entry(), "attention/sm90_mask", sizeof(Sm90MaskParams));
      return;
    }
    check_params(kernel.entry(), "attention/sm90", sizeof(Sm90AttentionParams));
    const AttentionRow row(kernel, Device());
    const bool reads_masks = kernel.entry().kind != "sm90";
    check_sm90_row(row, reads_masks);
    if (reads_masks && (row.rows > kMaskTileRows || row.columns > kMaskTileColumns)) {
      KernelFields(kernel).refuse("tile", "at most " + std::to_string(kMaskTileRows) +
                                              " queries and " + std::to_string(kMaskTileColumns) +
                                              " keys");
    }
  }

  std::unique_ptr<AttentionForwardKernels> forward(
      const Device& device, const std::vector<PackageKernel*>& kernels) const override {
    return std::make_unique<Sm90Forward>(device, kernels);
  }
};

const Sm90AttentionSeam g_sm90_attention;

}  // namespace
}  // namespace torch_cubin
