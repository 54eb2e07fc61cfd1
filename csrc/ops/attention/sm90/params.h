// What the backends of attention's kernels for Hopper fill parameters with: tensor maps of operands
// of 16-bit types, as (batch, head, row, column), in boxes of 64 columns and some rows under the
// 128-byte swizzle; lengths; the order of packed sequences' tiles; factors and transposed operands
// of float8_e4m3fn; and masks: their layout by tiles and blocks of keys, for both sorts and
// directions, and, for the forward, csrc/kernels/attention/sm90/added_mask.cu and the copy that it
// may make.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "kernels/attention/attention_params.h"
#include "kernels/attention/sm90/added_mask_params.h"
#include "kernels/attention/sm90/backward_params.h"
#include "kernels/attention/sm90/e4m3_params.h"
#include "kernels/attention/sm90/e4m3_values_params.h"
#include "kernels/attention/sm90/forward_params.h"
#include "kernels/attention/sm90/order_params.h"
#include "ops/attention/plan/plan.h"
#include "ops/common/launch.h"

namespace torch_cubin {

constexpr int64_t kSm90MostBlocks = 160;  // that the kernels' scheduler can balance

inline int64_t sm90_blocks(const Device& device) {
  return std::min<int64_t>(device.multiprocessors, kSm90MostBlocks);
}

// `stride`: batch, head, row; in elements, multiples of 16 bytes. `packed`: sequences are stored
// one after the other; then `rows` is the total, and `batch` is ignored.
struct Sm90MapRows {
  const void* data;
  const tc_int64 (&stride)[3];
  int64_t columns, rows, heads, batch;
  bool packed;
};

void encode_sm90_map(Sm90AttentionMap& out, const AttentionRow& kernel, const Sm90MapRows& rows,
                     int64_t box_rows, const Device& device);

// The same for elements of one byte, whose boxes have 64 or 128 columns under a swizzle of as many
// bytes.
void encode_sm90_byte_map(Sm90AttentionMap& out, const Sm90MapRows& rows, int64_t box_columns,
                          int64_t box_rows, const Device& device);

// The lengths and the band of a launch; for packed sequences the band before any shift.
Sm90Lengths sm90_lengths(const AttentionParams& all);

// The score modifications of `general` kernels, apart from the mask.
Sm90ScoreRule sm90_score_params(const AttentionParams& all);

// The rows of a launch: of a sequence, or of all packed ones.
struct Sm90Rows {
  Sm90Rows(const AttentionCase& problem, const FusedOperands& operands)
      : packed(problem.packed),
        sequences(std::max<int64_t>(problem.batch, 1)),
        q(operands.call.shape.total_q),
        k(operands.call.shape.total_k) {}

  // Tiles of `tile` rows in a head. For packed sequences an upper bound: each may end with a
  // partial tile.
  int64_t tiles(int64_t all_rows, int64_t tile) const {
    return packed ? all_rows / tile + sequences : ceil_div(all_rows, tile);
  }

  // A tensor with the queries' heads and rows, and one with the keys'.
  Sm90MapRows of_queries(const AttentionParams& all, const void* data, const tc_int64 (&stride)[3],
                         int64_t columns) const {
    return {data, stride, columns, q, all.heads, all.batch, packed};
  }
  Sm90MapRows of_keys(const AttentionParams& all, const void* data, const tc_int64 (&stride)[3],
                      int64_t columns) const {
    return {data, stride, columns, k, all.heads / all.group, all.batch, packed};
  }

  bool packed;
  int64_t sequences, q, k;
};

// The parameters that all kernels share, but the maps.
template <class Params>
void fill_sm90_sizes(Params& params, const AttentionParams& all) {
  params.out = all.out;
  std::copy_n(all.out_stride, 3, params.out_stride);
  const bool packed = all.cu_seqlens_q != nullptr;
  params.logsumexp_stride[0] = packed ? 0 : tc_int64{all.heads} * all.seqlen_q;  // batch, head
  params.logsumexp_stride[1] = packed ? all.total_q : all.seqlen_q;
  params.lengths = sm90_lengths(all);
  params.batch = all.batch;
  params.heads = all.heads;
  params.group = all.group;
  params.head_dim_v = all.head_dim_v;
}

// The parameters that forward and backward of 16-bit types share. `query_box`, `key_box`: rows of a
// box of the query, and of key and value.
template <class Params>
void fill_sm90_params(Params& params, const AttentionRow& row, const AttentionParams& all,
                      const Sm90Rows& rows, int64_t query_box, int64_t key_box,
                      const Device& device) {
  encode_sm90_map(params.q, row, rows.of_queries(all, all.q, all.q_stride, all.head_dim), query_box,
                  device);
  encode_sm90_map(params.k, row, rows.of_keys(all, all.k, all.k_stride, all.head_dim), key_box,
                  device);
  encode_sm90_map(params.v, row, rows.of_keys(all, all.v, all.v_stride, all.head_dim_v), key_box,
                  device);
  fill_sm90_sizes(params, all);
  params.score = sm90_score_params(all);
}

// The parameters of a backward of either dtype that describe the tiles, and the gradients of the
// output and of the inputs with their maps.
void fill_sm90_gradients(Sm90BackwardParams& params, const AttentionRow& row,
                         const AttentionParams& all, const Sm90Rows& rows, const Device& device);

// For check_row(): refuses a row that is not of a 16-bit type.
void check_16_bit(const AttentionRow& row);

constexpr AttentionStep kSm90OrderStep{"order", "attention/sm90/order", sizeof(Sm90OrderParams)};

// The order of packed sequences' tiles (sm90/order.cu), which a kernel computes before the others.
// It also clears the rows in `params` that belong to no sequence.
class Sm90TileOrder {
 public:
  // `capacity`: an upper bound of the tiles.
  Sm90TileOrder(const Device& device, int64_t capacity)
      : memory_(device, kHeader + capacity * static_cast<int64_t>(sizeof(Sm90OrderPlace))),
        capacity_(capacity) {}

  // Launches it. `params` has the numbers of the tiles and the rows to clear.
  void make(PackageKernel& kernel, const Device& device, const AttentionRow& row,
            const AttentionParams& all, Sm90OrderParams& params) const;
  // The same for a forward, whose output and logsumexp are cleared.
  void make_of_queries(PackageKernel& kernel, const Device& device, const AttentionRow& row,
                       const AttentionParams& all) const;

  Sm90Order* data() const { return reinterpret_cast<Sm90Order*>(memory_.data()); }

 private:
  static constexpr int64_t kHeader = sizeof(Sm90Order) - sizeof(Sm90OrderPlace);
  Workspace memory_;
  int64_t capacity_;
};

// A tensor whose rows that belong to no sequence become zeros, and all NaN if cu_seqlens are
// invalid.
Sm90EmptyRows sm90_empty_rows(void* data, const tc_int64 (&stride)[3], int64_t heads,
                              int64_t columns, bool of_keys);

constexpr AttentionStep kSm90TransposeStep{"transpose", "attention/sm90/e4m3_values",
                                           sizeof(Sm90E4m3ValuesParams)};
constexpr int64_t kTransposedGroup = 16;  // keys whose order is one pattern

Sm90Descale sm90_descale(const std::optional<TensorView>& view);

// Launches a kernel of kSm90TransposeStep. `params` has v, out, next, stride, columns, keys and
// granule; the others follow from `all` and `rows`.
void transpose_keys(PackageKernel& kernel, const Device& device, const AttentionParams& all,
                    const Sm90Rows& rows, Sm90E4m3ValuesParams& params);

// The largest copy of a mask's numbers: calls that need more use the portable kernels, which read
// the mask where it is.
constexpr int64_t kMostMaskBytes = int64_t{1} << 32;

// The batches, heads and rows of a mask, by blocks of keys.
struct Sm90MaskGrid {
  Sm90MaskGrid(const AttentionParams& all, int64_t tile_rows, int64_t tile_columns);

  // The common parameters of the kernels that convert a mask.
  template <class Params>
  void fill(Params& params, const AttentionParams& all) const {
    for (int dim = 0; dim < 4; ++dim) params.stride[dim] = all.mask_stride[dim];
    params.heads = static_cast<int>(heads);
    params.rows = static_cast<int>(rows);
    params.columns = all.seqlen_k;
    params.tile_rows = static_cast<int>(tile_rows);
    params.tile_columns = static_cast<int>(tile_columns);
    params.tiles = static_cast<int>(tiles);
    params.blocks = static_cast<int>(blocks);
    params.chunks = static_cast<int>(chunks);
  }

  // Strides of batch, head and line; 0 for dims of size 1 in the mask. `lines` of `size` elements a
  // head.
  void strides(tc_int64 (&out)[3], int64_t lines, int64_t size) const;

  int64_t grid() const { return planes * tiles * chunks; }

  int64_t tile_rows, tile_columns;
  int64_t batch, heads, rows, planes;  // planes: batch * heads
  int64_t tiles, blocks, chunks;       // of rows, of keys, of kMaskTileBlocks blocks
};

// The bits of a mask's -inf. `dtype`: of the tensors, and of a mask that is not float32.
inline unsigned minus_infinity(bool floats, AttentionDtype dtype) {
  return floats ? 0xff800000u : dtype == kAttendFloat16 ? 0xfc00u : 0xff80u;
}

class Sm90AddedMaskCall {
 public:
  Sm90AddedMaskCall(const AttentionParams& all, AttentionDtype dtype, const Sm90MaskGrid& grid);

  // Bytes of the copy; 0 if the mask is read directly.
  int64_t copied_bytes() const { return copied_; }

  // `next`, `classes`, `classes_of_tile`: see Sm90AddedMaskParams. `copies`: copied_bytes(),
  // aligned to 16. Returns the parameter of the attention kernel.
  Sm90AddedMask launch(PackageKernel& kernel, const Device& device, int* next,
                       unsigned char* classes, int64_t classes_of_tile, char* copies);

 private:
  Sm90MaskGrid grid_;
  int64_t copied_ = 0;
  Sm90AddedMaskParams params_{};
  Sm90AddedMask result_{};
};

}  // namespace torch_cubin
