// flash_attention_with_kvcache: attention of a few queries over a cache of keys and values, to
// which the same call appends new ones. The checked arguments of one call.
#pragma once

#include <cstdint>
#include <optional>

#include "ops/attention/problem/arguments.h"

namespace torch_cubin {

// The list of the op's options, like TC_ATTENTION_OPTIONS for the others.
#define TC_KV_CACHE_OPTIONS(X)                          \
  TC_SHARED_OPTIONS(X)                                  \
  X(OptionalTensor, k, std::nullopt)                    \
  X(OptionalTensor, v, std::nullopt)                    \
  X(OptionalTensor, rotary_cos, std::nullopt)           \
  X(OptionalTensor, rotary_sin, std::nullopt)           \
  X(OptionalTensor, cache_seqlens, std::nullopt)        \
  X(OptionalTensor, cache_batch_idx, std::nullopt)      \
  X(OptionalTensor, block_table, std::nullopt)          \
  X(std::optional<double>, softmax_scale, std::nullopt) \
  X(bool, causal, false)                                \
  X(bool, rotary_interleaved, true)                     \
  X(OptionalTensor, k_descale, std::nullopt)            \
  X(OptionalTensor, v_descale, std::nullopt)

template <class T>
struct KvCacheOptionsOf {
  TC_KV_CACHE_OPTIONS(TC_OPTION_MEMBER)

  // Whether each query row has its own position for rotation; otherwise all use the first new one.
  bool rotates_by_row() const { return causal || window_left >= 0 || window_right >= 0; }

  // The options of its attention over keys and values that stand in no cache.
  AttentionOptionsOf<T> of_attention() const {
    AttentionOptionsOf<T> options;
    TC_SHARED_OPTIONS(TC_OPTION_COPIED)
    options.is_causal = causal;
    options.scale = softmax_scale;
    options.enable_gqa = options.bottom_right = true;
    return options;
  }
};

struct KvCacheOptions : KvCacheOptionsOf<Tensor> {
  static const std::vector<OptionEntry<KvCacheOptions>>& entries();
};

// All arguments of a call. Options are members under their own names.
template <class Options, class T>
struct KvCacheArgumentsOf : Options {
  T q, k_cache, v_cache;
};
using KvCacheArguments = KvCacheArgumentsOf<KvCacheOptions, Tensor>;
using KvCacheViews = KvCacheArgumentsOf<KvCacheOptionsOf<TensorView>, TensorView>;  // or described

struct KvCacheShape {
  int64_t batch, heads, kv_heads, head_dim, head_dim_v;
  int64_t seqlen_q, new_columns;
  int64_t capacity;     // columns that a sequence can have
  int64_t cache_batch;  // sequences of the cache; with pages: 0
  int64_t pages, page_size;
  int64_t rotary_dim, positions;
  bool e4m3;  // the caches' dtype; otherwise it is the query's
  AttentionSettings settings;

  int64_t group() const { return kv_heads > 0 ? heads / kv_heads : 1; }
  // A call without queries may still write new keys.
  bool has_queries() const { return seqlen_q > 0 && heads > 0; }
};

// Throws [input].
KvCacheShape check_kv_cache(const KvCacheViews& views);

// The checked arguments, with tensors as kernels read them; the caches are used in place.
struct KvCacheCall : KvCacheArguments {
  explicit KvCacheCall(KvCacheArguments arguments);

  KvCacheShape shape;
  ScalarType dtype;
  int32_t device_index;
  Tensor out;  // contiguous
};

}  // namespace torch_cubin
