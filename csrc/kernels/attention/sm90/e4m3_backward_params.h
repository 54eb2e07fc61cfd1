// The parameter of the kernels of attention's backward for e4m3 on Hopper, shared by host and
// device code: sm90/e4m3_backward_delta.cu, sm90/e4m3_backward.cu and sm90/backward_convert.cu, in
// this order.
//
// Sm90BackwardParams applies but for these. Elements of its maps q, k and v, and of grad_bytes, are
// bytes, in boxes of a panel of 128 columns, or 64 if a head has no more, by tile_rows or
// tile_keys. A tile's sums have a third number for each row: the inverse of its entry of
// row_factors.
//
// grad_bytes is grad_out, each row divided by a power of two, its entry of row_factors, and rounded
// to e4m3; the 16-bit q is q times that factor, which rounds nothing. So dS is computed in units of
// row_factor * v_descale, and dk needs no other factor than its head's. wide_q is that q, in boxes
// as grad_out's, if sm90/e4m3_backward_delta.cu makes it: then wide_query is not null.
#pragma once

#include "backward_params.h"
#include "e4m3_params.h"

namespace torch_cubin {

// Weights are computed as 2^-kE4m3WeightShift of themselves, so that dS fits into e5m2: it is at
// most a quarter of the range of a row's dP, which is that of a sum of 128 products of e4m3, 2 *
// 128 * 448^2; 2^-8 of that is 0.88 of 57344, e5m2's largest number.
constexpr int kE4m3WeightShift = 8;

struct Sm90E4m3BackwardParams : Sm90BackwardParams {
  Sm90AttentionMap grad_bytes, wide_q;
  Sm90Descale q_descale, k_descale, v_descale;
  unsigned char* grad_rows;    // [batch][head][row][head_dim_v] of e4m3
  const unsigned char* query;  // rows of e4m3
  tc_int64 query_stride[3];    // batch, head, row
  unsigned short* wide_query;  // [batch][head][row][head_dim] of bfloat16, or null
  float* row_factors;          // [tile of queries][tile_rows]
};

}  // namespace torch_cubin
