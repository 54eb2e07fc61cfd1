// The one parameter of the kernels of sm90.cu, shared by host and device code.
//
//   out[b, h, i, :] = sum_j P[i, j] v[b, h / group, j, :],   P = softmax_j(scale * q_i . k_j)
//
// where row i attends to column j if  i + first <= j <= i + last  and j < seqlen_k. A row that
// attends to nothing gives zeros, and logsumexp -inf.
//
// q, k and v are described by tensor maps of 4 dims, {head_dim, rows, heads, batch}, 128-byte
// swizzle; columns and rows that do not exist are read as zeros. Boxes:
//   q:       {64, 64, 1, 1}
//   k and v: {64, tile N, 1, 1}; a cluster shares them, and where head_dim is 64 each block loads
//            half of the rows: {64, tile N / 2, 1, 1}
#pragma once

namespace torch_cubin {

typedef long long tc_int64;  // device code includes no <cstdint>

struct alignas(64) Sm90AttentionMap {
  unsigned long long words[16];
};

struct Sm90AttentionParams {
  Sm90AttentionMap q, k, v;
  void* out;         // rows of 16-byte vectors
  float* logsumexp;  // null, or [batch][head][row]
  tc_int64 out_stride[3];  // batch, head, row; in elements
  int batch, heads, group;
  int seqlen_q, seqlen_k;  // at least 1
  int head_dim_v;          // columns of out, a multiple of 8
  int first, last;
  // Tiles of a cluster (of all its blocks' rows) along the queries. With balance_heads > 0 they are
  // dealt out so that all clusters end together: the tiles of so many heads at a time, those of the
  // last queries first, each to the cluster that has the least to do. With 0 each cluster takes
  // every so-many-th tile.
  int tiles;
  int balance_heads;
  float scale;  // positive
  float unit;   // scale * log2(e), a normal number
};

}  // namespace torch_cubin
