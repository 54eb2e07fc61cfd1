// flash_attention_with_kvcache: attention of a few queries over a cache of keys and values, to
// which it adds new ones in the same call. The checked arguments of one call.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "ops/attention/problem/checks.h"

namespace torch_cubin {

// The options of the schema in ops_attention.cpp that are no tensors.
struct KvCacheOptions {
  std::optional<double> softmax_scale;
  bool causal = false;
  int64_t window_left = -1, window_right = -1;
  double softcap = 0;
  bool rotary_interleaved = true;
};

// Does something with the name of each tensor that a call may omit.
#define TC_KV_CACHE_OPTIONAL_TENSORS(X) \
  X(k)                                  \
  X(v)                                  \
  X(rotary_cos)                         \
  X(rotary_sin)                         \
  X(cache_seqlens)                      \
  X(cache_batch_idx) X(block_table) X(alibi_slopes) X(sinks) X(k_descale) X(v_descale)

// The tensors of a call.
template <class T>
struct KvCacheTensors {
  T q, k_cache, v_cache;
#define TC_MEMBER(name) std::optional<T> name;
  TC_KV_CACHE_OPTIONAL_TENSORS(TC_MEMBER)
#undef TC_MEMBER
};
using KvCacheViews = KvCacheTensors<TensorView>;  // of a call's own, or described

struct KvCacheShape {
  int64_t batch, heads, kv_heads, head_dim, head_dim_v;
  int64_t seqlen_q, new_columns;
  int64_t capacity;     // columns that a sequence can have
  int64_t cache_batch;  // sequences of the cache; with pages: 0
  int64_t pages, page_size;
  int64_t rotary_dim, positions;
  bool e4m3;  // the caches' dtype; else that of the query
  AttentionSettings settings;

  int64_t group() const { return kv_heads > 0 ? heads / kv_heads : 1; }
  // Without any, a call may still write new keys.
  bool has_queries() const { return seqlen_q > 0 && heads > 0; }
  // Whether the query's rows stand at positions of their own; else all at the first new one.
  bool rotates_by_row(const KvCacheOptions& options) const {
    return options.causal || options.window_left >= 0 || options.window_right >= 0;
  }
};

// Throws [input].
KvCacheShape check_kv_cache(const KvCacheViews& views, const KvCacheOptions& options);
void check_described_kv_cache(const nlohmann::json& call);

// The tensors as kernels read them; those of the cache are where they were.
struct KvCacheCall : KvCacheTensors<Tensor> {
  KvCacheShape shape;
  KvCacheOptions options;
  ScalarType dtype;
  int32_t device_index;
  Tensor out;  // contiguous
};

}  // namespace torch_cubin
