// Common parts of the backends of attention's kernels for Hopper: tensor maps of operands of 16-bit
// types, as (batch, head, row, column), in boxes of 64 columns and some rows under the 128-byte
// swizzle; lengths; and the order of packed sequences' tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/attention/attention_params.h"
#include "kernels/attention/sm90/forward_params.h"
#include "kernels/attention/sm90/order_params.h"
#include "ops/attention/plan/backend.h"
#include "ops/common/launch.h"

namespace torch_cubin {

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

  bool packed;
  int64_t sequences, q, k;
};

// The parameters that forward and backward share, and the maps of query, key and value.
// `query_box`, `key_box`: rows of a box of the query, and of key and value.
template <class Params>
void fill_sm90_params(Params& params, const AttentionRow& row, const AttentionParams& all,
                      const Sm90Rows& rows, int64_t query_box, int64_t key_box,
                      const Device& device) {
  const int64_t kv_heads = all.heads / all.group;
  encode_sm90_map(params.q, row,
                  {all.q, all.q_stride, all.head_dim, rows.q, all.heads, all.batch, rows.packed},
                  query_box, device);
  encode_sm90_map(params.k, row,
                  {all.k, all.k_stride, all.head_dim, rows.k, kv_heads, all.batch, rows.packed},
                  key_box, device);
  encode_sm90_map(params.v, row,
                  {all.v, all.v_stride, all.head_dim_v, rows.k, kv_heads, all.batch, rows.packed},
                  key_box, device);
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
  params.score = sm90_score_params(all);
}

// The maps of dk and dv, for kernels of up to 128 columns.
template <class Params>
void fill_sm90_gradient_maps(Params& params, const AttentionRow& row, const AttentionParams& all,
                             const Sm90Rows& rows, int64_t box_rows, const Device& device) {
  if (row.head_dim > 128) return;
  const int64_t kv_heads = all.heads / all.group;
  encode_sm90_map(params.dk_map, row,
                  {all.dk, all.dk_stride, all.head_dim, rows.k, kv_heads, all.batch, rows.packed},
                  box_rows, device);
  encode_sm90_map(params.dv_map, row,
                  {all.dv, all.dv_stride, all.head_dim_v, rows.k, kv_heads, all.batch, rows.packed},
                  box_rows, device);
}

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

}  // namespace torch_cubin
