// The one parameter of every kernel of the library, by value.
#pragma once

#include <cstdint>

struct FmhaParams {
  CUtensorMap kv_map;  // of kv (batch, seqlen_kv, 2, heads_kv, head_size), for the layout KV
  const void* q;
  const void* k;  // of the layouts QKV and PAGED
  const void* v;
  void* out;
  const int32_t* cu_seqlens_q;   // (batch + 1)
  const int32_t* seqlens_kv;     // (batch), of the layouts KV and PAGED
  const int32_t* block_offsets;  // (batch, pages_per_sequence), of the layout PAGED
  int32_t* counter;              // rows that warps have taken; zero at the start
  int64_t q_stride;              // elements between tokens
  int64_t kv_stride;             // between tokens, or pages
  int32_t total_q;
  int32_t heads;
  int32_t heads_kv;
  int32_t page_size;
  int32_t pages_per_sequence;
  int32_t window = 1;   // keys that a query sees with the mask SLIDING, including its own
  uint32_t scale_bits;  // of a float
};
