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
//   k and v: {64, tile N, 1, 1}
#pragma once

namespace torch_cubin {

typedef long long tc_int64;  // device code includes no <cstdint>

struct alignas(64) Sm90AttentionMap {
  unsigned long long words[16];
};

// How the tiles are dealt out to the blocks (Sm90AttentionParams::deal).
enum Sm90AttentionDeal {
  // Every block takes every so-many-th tile: for tiles that all take the same time.
  kInTurn = 0,
  // Every so-many-th pair of a head's tiles, the longest with the shortest: for causal attention.
  kInPairs = -1,
  // A positive number: tiles of so many heads at a time, the last queries first, each to the block
  // with the least to do. Every block makes the whole list, 100 ns or more for each tile, so that
  // an average tile must take much longer than 15 us.
};

struct Sm90AttentionParams {
  Sm90AttentionMap q, k, v;
  void* out;               // rows of 16-byte vectors
  float* logsumexp;        // null, or [batch][head][row]
  tc_int64 out_stride[3];  // batch, head, row; in elements
  int batch, heads, group;
  int seqlen_q, seqlen_k;  // at least 1
  int head_dim_v;          // columns of out, a multiple of 8
  int first, last;
  int tiles;  // along the queries
  // kInTurn, kInPairs, or a positive number of heads; at most 160 blocks.
  int deal;
  float unit;  // scale * log2(e), a positive normal number
};

}  // namespace torch_cubin
