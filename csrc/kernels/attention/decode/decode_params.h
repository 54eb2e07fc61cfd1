// The parameter of decode.cu: the family's, extended for keys and values in a cache whose sequences
// have individual lengths on the device, or pages.
//
// With `cache` set, sequence b has clamp(cache_seqlens[b], 0, seqlen_k) + new_columns columns, at
// most the capacity seqlen_k; all seqlen_k if cache_seqlens is null. Its keys and values are those
// of sequence cache_batch_idx[b] of the cache (b if that is null). With a block table, column j is
// row j % page_size of page block_table[b][j / page_size]: k_stride[0] and v_stride[0] are then the
// strides between pages. Indices outside the cache are clamped: the result is of some page, and
// nothing outside is read.
//
// Kernels for caches of e4m3 (dtype float8_e4m3fn) require `cache`. Their strides count elements of
// one byte. A key is k_descale[batch][kv_head] times the cache's number, a value v_descale times
// it; null: 1.
#pragma once

#include "../attention_params.h"

namespace torch_cubin {

struct DecodeParams : AttentionParams {
  const int* cache_seqlens;    // [batch], or null
  const int* cache_batch_idx;  // [batch], or null
  const int* block_table;      // [batch][block_table_stride], or null
  tc_int64 block_table_stride;
  int cache;  // 0: a plain forward, which ignores all of the above
  int new_columns;
  int cache_batch;  // sequences of the cache
  int pages, page_size;
  // With splits > 1 and `cache` a sequence is split into its columns / max(fewest_columns, share *
  // columns of all sequences) parts, at least one and at most `splits`. With share = 0 the split
  // depends on the sequence alone. A sequence counts with at most seen_columns, those of the
  // window.
  float fewest_columns, share;
  int seen_columns;
  // Tiles of columns to prefetch to the L2 cache before the previous kernel has ended; 0 with
  // cu_seqlens.
  int prefetched;
  int bfloat16;  // e4m3 caches: whether q and out are bfloat16; 0: float16
  const float* k_descale;
  const float* v_descale;
  tc_int64 k_descale_stride[2];  // batch, head
  tc_int64 v_descale_stride[2];
};

}  // namespace torch_cubin
