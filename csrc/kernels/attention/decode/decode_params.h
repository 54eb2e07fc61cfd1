// The parameter of decode.cu: that of the family, and where keys and values are a cache whose
// sequences have lengths of their own, on the device, or lie in pages.
//
// With `cache` set, sequence b has clamp(cache_seqlens[b], 0, seqlen_k) + new_columns columns, at
// most seqlen_k, the capacity; all seqlen_k of them where cache_seqlens is null. Its keys and
// values are those of sequence cache_batch_idx[b] of the cache (b where that is null), or, with a
// block table, column j is row j % page_size of page block_table[b][j / page_size]: k_stride[0] and
// v_stride[0] then lead from page to page. Indices outside the cache are moved to its ends: the
// result is of some page, nothing else is read.
//
// Kernels for caches of e4m3 (kind decode_e4m3) take them alone, `cache` set. Their strides count
// elements of one byte. A key is k_descale[batch][kv_head] times what the cache holds, a value
// v_descale times that; null: 1.
#pragma once

#include "../attention_params.h"

namespace torch_cubin {

struct DecodeParams : AttentionParams {
  const int* cache_seqlens;    // [batch], or null
  const int* cache_batch_idx;  // [batch], or null
  const int* block_table;      // [batch][block_table_stride], or null
  tc_int64 block_table_stride;
  int cache;  // 0: a plain forward, all of the above is ignored
  int new_columns;
  int cache_batch;  // sequences of the cache
  int pages, page_size;
  // With splits > 1 and `cache` a sequence is cut into its columns / max(fewest_columns, share *
  // columns of all sequences) parts, at least one and at most `splits`. share = 0 makes that a
  // function of the sequence alone. A sequence counts with at most seen_columns, of the window.
  float fewest_columns, share;
  int seen_columns;
  // So many tiles of columns go to the L2 cache before the kernel ahead has ended; 0 with
  // cu_seqlens.
  int prefetched;
  int bfloat16;  // e4m3 caches: the dtype of q and out; 0: float16
  const float* k_descale;
  const float* v_descale;
  tc_int64 k_descale_stride[2];  // batch, head
  tc_int64 v_descale_stride[2];
};

}  // namespace torch_cubin
