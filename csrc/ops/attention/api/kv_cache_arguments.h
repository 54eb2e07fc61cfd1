// The arguments of flash_attention_with_kvcache, checked, as its device's code takes them.
#pragma once

#include "ops/attention/api/attention.h"
#include "ops/attention/problem/kv_cache.h"

namespace torch_cubin {

inline KvCacheCall kv_cache_call(TC_KV_CACHE_ARGUMENTS) {
#define TC_VIEW(name) view_of(name),
  const KvCacheViews views{TensorView(q), TensorView(k_cache), TensorView(v_cache),
                           TC_KV_CACHE_OPTIONAL_TENSORS(TC_VIEW)};
#undef TC_VIEW
  const KvCacheOptions options{softmax_scale, causal,  window_left,
                               window_right,  softcap, rotary_interleaved};
#define TC_SAME(name) name,
  return {{q, k_cache, v_cache, TC_KV_CACHE_OPTIONAL_TENSORS(TC_SAME)},
          check_kv_cache(views, options),
          options,
          views.q.dtype,
          views.q.device_index,
          Tensor()};
#undef TC_SAME
}

#define TC_KV_CACHE_CALL                                                                           \
  q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, block_table,  \
      softmax_scale, causal, window_left, window_right, softcap, rotary_interleaved, alibi_slopes, \
      sinks, k_descale, v_descale

}  // namespace torch_cubin
