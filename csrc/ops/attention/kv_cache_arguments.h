// The arguments of flash_attention_with_kvcache, checked, as its device's code takes them.
#pragma once

#include "ops/attention/kv_cache.h"

namespace torch_cubin {

inline KvCacheCall kv_cache_call(TC_KV_CACHE_ARGUMENTS) {
  const auto view = [](const OptionalTensor& tensor) {
    return tensor ? std::optional<TensorView>(*tensor) : std::nullopt;
  };
  const KvCacheViews views{TensorView(q),
                           TensorView(k_cache),
                           TensorView(v_cache),
                           view(k),
                           view(v),
                           view(rotary_cos),
                           view(rotary_sin),
                           view(cache_seqlens),
                           view(cache_batch_idx),
                           view(block_table),
                           view(alibi_slopes),
                           view(sinks),
                           view(k_descale),
                           view(v_descale)};
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
