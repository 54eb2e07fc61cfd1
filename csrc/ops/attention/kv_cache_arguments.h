// The arguments of flash_attention_with_kvcache, checked, as its device's code takes them.
#pragma once

#include "ops/attention/kv_cache.h"

namespace torch_cubin {

inline KvCacheCall kv_cache_call(TC_KV_CACHE_ARGUMENTS) {
  const KvCacheViews views{TensorView(q),
                           TensorView(k_cache),
                           TensorView(v_cache),
                           view_of(k),
                           view_of(v),
                           view_of(rotary_cos),
                           view_of(rotary_sin),
                           view_of(cache_seqlens),
                           view_of(cache_batch_idx),
                           view_of(block_table),
                           view_of(alibi_slopes),
                           view_of(sinks),
                           view_of(k_descale),
                           view_of(v_descale)};
  const KvCacheOptions options{softmax_scale, causal,  window_left,
                               window_right,  softcap, rotary_interleaved};
  return {check_kv_cache(views, options),
          options,
          views.q.dtype,
          views.q.device_index,
          q,
          k_cache,
          v_cache,
          Tensor(),
          k,
          v,
          rotary_cos,
          rotary_sin,
          cache_seqlens,
          cache_batch_idx,
          block_table,
          alibi_slopes,
          sinks,
          k_descale,
          v_descale};
}

#define TC_KV_CACHE_CALL                                                                           \
  q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, block_table,  \
      softmax_scale, causal, window_left, window_right, softcap, rotary_interleaved, alibi_slopes, \
      sinks, k_descale, v_descale

}  // namespace torch_cubin
