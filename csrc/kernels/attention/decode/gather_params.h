// The parameter of decode/gather.cu, which copies the sequences of a cache one behind the other, as
// packed sequences: row r of sequence b becomes row cu_k[b] + r. The cache, its lengths and its
// pages are as in decode_params.h.
#pragma once

typedef long long tc_int64;  // device code includes no <cstdint>

namespace torch_cubin {

struct DecodeGatherParams {
  const void* k;  // the caches
  const void* v;
  void* k_out;  // [rows of all sequences][kv_heads][head_dim]
  void* v_out;
  int* cu_q;                 // [batch + 1]: multiples of seqlen_q
  int* cu_k;                 // [batch + 1]
  const int* cache_seqlens;  // see decode_params.h
  const int* cache_batch_idx;
  const int* block_table;
  tc_int64 block_table_stride;
  tc_int64 k_stride[3];  // sequence or page, row, head; elements of two bytes
  tc_int64 v_stride[3];
  int batch, heads, kv_heads;
  int seqlen_q, new_columns, capacity;
  int head_dim, head_dim_v;  // multiples of eight
  int cache_batch, pages, page_size;
};

}  // namespace torch_cubin
