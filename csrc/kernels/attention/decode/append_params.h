// The parameter of decode/append.cu, which writes new keys and values behind those of a cache, and
// rotates them and the query by their positions.
//
// A key's position is clamp(cache_seqlens[b], 0, capacity) + its row. Keys past the capacity are
// not written, nor are those of an index outside the cache. Columns 2c and 2c + 1 (interleaved), or
// c and c + rotary_dim / 2, are a pair that is rotated by the angle of cos[position][c] and
// sin[position][c]; positions past the tables' end use their last row. Every row is whole vectors
// of 16 bytes.
//
// Kernels for caches of e4m3 (dtype float8_e4m3fn) write x / descale, rounded once to nearest even,
// at most 448 in magnitude; for a descale see decode_params.h.
#pragma once

typedef long long tc_int64;  // device code includes no <cstdint>

namespace torch_cubin {

struct DecodeAppendParams {
  const void* q;  // null: nothing to rotate
  void* q_out;    // [batch][seqlen_q][heads][head_dim]
  const void* k;  // null: nothing to write
  const void* v;
  void* k_cache;
  void* v_cache;
  const void* cos;  // [positions][rotary_dim / 2], or null
  const void* sin;
  const int* cache_seqlens;  // see decode_params.h
  const int* cache_batch_idx;
  const int* block_table;
  tc_int64 block_table_stride;
  tc_int64 q_stride[3];  // batch, row, head; elements
  tc_int64 k_stride[3];
  tc_int64 v_stride[3];
  tc_int64 k_cache_stride[3];  // sequence or page, row, head
  tc_int64 v_cache_stride[3];
  tc_int64 cos_stride, sin_stride;  // between positions
  int batch, heads, kv_heads;
  int seqlen_q, new_columns, capacity;
  int head_dim, head_dim_v;
  int cache_batch, pages, page_size;
  int rotary_dim;  // 0: none
  int positions;   // rows of cos and sin
  int interleaved;
  const float* k_descale;
  const float* v_descale;
  tc_int64 k_descale_stride[2];
  tc_int64 v_descale_stride[2];
  int q_one_position;  // all rows of the query have the first new position
};

}  // namespace torch_cubin
