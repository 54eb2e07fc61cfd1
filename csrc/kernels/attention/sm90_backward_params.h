// The one parameter of the three kernels of attention's backward on Hopper, shared by host and device
// code: sm90_backward_delta.cu, sm90_backward.cu, sm90_backward_convert.cu, in this order.
//
// Row i attends to column j if  i + first <= j <= i + last  and j < seqlen_k.
//
// q, k, v and grad_out are described by tensor maps of 4 dims, {columns, rows, heads, batch}, 128-byte
// swizzle; columns and rows that do not exist are read as zeros. Boxes: {64, tile_rows, 1, 1} for q and
// grad_out, {64, 128, 1, 1} for k and v.
#pragma once

#include "sm90_params.h"

namespace torch_cubin {

constexpr int kSm90BackwardKeys = 128;  // of a block

struct Sm90BackwardParams {
  Sm90AttentionMap q, k, v, grad_out;

  // Between the kernels, for each head of each batch and each tile of tile_rows queries:
  float* sums;    // [2][tile_rows]: logsumexp * log2(e), and delta
  float* dq_sum;  // [tile_columns * tile_rows], in the order of sm90_backward_dq.cuh
  int* turns;     // how many blocks have added to dq_sum

  const void* out;            // with those of grad_out, for delta
  const void* grad_out_rows;  // what the map describes
  const float* logsumexp;     // [batch][head][row]
  void* dq;                   // all of these: rows of 16-byte vectors
  void* dk;
  void* dv;
  tc_int64 out_stride[3];  // batch, head, row; in elements
  tc_int64 grad_out_stride[3], dq_stride[3], dk_stride[3], dv_stride[3];
  int batch, heads, group;
  int seqlen_q, seqlen_k;    // at least 1
  int head_dim, head_dim_v;  // of the tensors, multiples of 8
  int first, last;
  int tile_rows, tile_columns;  // of a step of sm90_backward.cu: queries, and its head_dim
  int tiles, key_tiles;         // along the queries and the keys
  int together;                 // heads of keys whose blocks run beside each other
  float scale, unit;            // unit: scale * log2(e), a positive normal number
};

}  // namespace torch_cubin
