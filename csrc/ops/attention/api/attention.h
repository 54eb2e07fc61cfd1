// The attention family's entry points, as ops_attention.cpp registers them.
//
// Each allocates fresh outputs whose dims lie in memory in the order of query's (output_strides in
// problem/checks.h). The CPU ones are references made of ATen (reference.cpp). The public ops
// forward to these from csrc/ops_attention.cpp, scaled_dot_product_attention through composite.cpp
// and flash_attention through flash_attention.cpp.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include "ops/attention/problem/options.h"

namespace torch_cubin {

#define TC_ATTENTION_ARGUMENTS                                                          \
  const OptionalTensor &attn_mask, double dropout_p, bool is_causal,                    \
      const OptionalTensor &dropout_seed, std::optional<double> scale, bool enable_gqa, \
      int64_t window_left, int64_t window_right, bool bottom_right, double softcap,     \
      const OptionalTensor &alibi_slopes, const OptionalTensor &sinks,                  \
      const OptionalTensor &cu_seqlens_q, const OptionalTensor &cu_seqlens_k,           \
      int64_t max_seqlen_q, int64_t max_seqlen_k

// AttentionOptions of these arguments.
#define TC_ATTENTION_OPTIONS                                                                     \
  AttentionOptions {                                                                             \
    attn_mask, dropout_p, is_causal, dropout_seed, scale, enable_gqa, window_left, window_right, \
        bottom_right, softcap, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,    \
        max_seqlen_k                                                                             \
  }

// The same for the ops of float8_e4m3fn.
#define TC_E4M3_ARGUMENTS                                                                  \
  bool is_causal, std::optional<double> scale, int64_t window_left, int64_t window_right,  \
      bool bottom_right, const OptionalTensor &q_descale, const OptionalTensor &k_descale, \
      const OptionalTensor &v_descale, const OptionalTensor &cu_seqlens_q,                 \
      const OptionalTensor &cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k

#define TC_E4M3_OPTIONS                                                                          \
  AttentionOptions {                                                                             \
    std::nullopt, 0.0, is_causal, std::nullopt, scale, true, window_left, window_right,          \
        bottom_right, 0.0, std::nullopt, std::nullopt, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, \
        max_seqlen_k, true, q_descale, k_descale, v_descale                                      \
  }

// The public ops that do more than to forward by the grad mode.
void scaled_dot_product_attention_composite(StableIValue* stack, uint64_t, uint64_t);
// Other layouts of the same attention. Throws [input] where a rank or the packing is wrong;
// attention_forward checks the rest.
Tensor flash_attention(const Tensor& query, const OptionalTensor& key, const OptionalTensor& value,
                       bool is_causal, std::optional<double> scale, int64_t window_left,
                       int64_t window_right, bool bottom_right, double softcap,
                       const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                       const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                       int64_t max_seqlen_q, int64_t max_seqlen_k, double dropout_p,
                       const OptionalTensor& q_descale, const OptionalTensor& k_descale,
                       const OptionalTensor& v_descale);

// call_op() of cubin::_attention_forward, of _attention_forward_e4m3 or of the variant of either
// with a derivative for another public op, the `caller`: errors name that one.
void call_attention_forward(const char* op, const char* caller, StableIValue* stack);

Tensor scaled_dot_product_attention_cpu(const Tensor& query, const Tensor& key, const Tensor& value,
                                        const OptionalTensor& attn_mask, double dropout_p,
                                        bool is_causal, const OptionalTensor& dropout_seed,
                                        std::optional<double> scale, bool enable_gqa);
Tensor scaled_dot_product_attention_cuda(const Tensor& query, const Tensor& key,
                                         const Tensor& value, const OptionalTensor& attn_mask,
                                         double dropout_p, bool is_causal,
                                         const OptionalTensor& dropout_seed,
                                         std::optional<double> scale, bool enable_gqa);

std::tuple<Tensor, Tensor> attention_forward_cpu(const Tensor& query, const Tensor& key,
                                                 const Tensor& value, TC_ATTENTION_ARGUMENTS);
std::tuple<Tensor, Tensor> attention_forward_cuda(const Tensor& query, const Tensor& key,
                                                  const Tensor& value, TC_ATTENTION_ARGUMENTS);

std::tuple<Tensor, Tensor> attention_forward_e4m3_cpu(const Tensor& query, const Tensor& key,
                                                      const Tensor& value, TC_E4M3_ARGUMENTS);
std::tuple<Tensor, Tensor> attention_forward_e4m3_cuda(const Tensor& query, const Tensor& key,
                                                       const Tensor& value, TC_E4M3_ARGUMENTS);

std::tuple<Tensor, Tensor, Tensor> attention_backward_cpu(const Tensor& grad_out,
                                                          const Tensor& query, const Tensor& key,
                                                          const Tensor& value, const Tensor& out,
                                                          const Tensor& logsumexp,
                                                          TC_ATTENTION_ARGUMENTS);
std::tuple<Tensor, Tensor, Tensor> attention_backward_cuda(const Tensor& grad_out,
                                                           const Tensor& query, const Tensor& key,
                                                           const Tensor& value, const Tensor& out,
                                                           const Tensor& logsumexp,
                                                           TC_ATTENTION_ARGUMENTS);

// float32 [heads]: minus the sum over rows of exp(sinks - logsumexp) * sum(grad_out * out), of
// float16, bfloat16 or float32 [batch, heads, rows, head_dim]. Throws [no_kernel] where the catalog
// has none.
Tensor attention_sinks_gradient_cuda(const Tensor& grad_out, const Tensor& out,
                                     const Tensor& logsumexp, const Tensor& sinks);

#define TC_KV_CACHE_ARGUMENTS                                                                      \
  const Tensor &q, const Tensor &k_cache, const Tensor &v_cache, const OptionalTensor &k,          \
      const OptionalTensor &v, const OptionalTensor &rotary_cos, const OptionalTensor &rotary_sin, \
      const OptionalTensor &cache_seqlens, const OptionalTensor &cache_batch_idx,                  \
      const OptionalTensor &block_table, std::optional<double> softmax_scale, bool causal,         \
      int64_t window_left, int64_t window_right, double softcap, bool rotary_interleaved,          \
      const OptionalTensor &alibi_slopes, const OptionalTensor &sinks,                             \
      const OptionalTensor &k_descale, const OptionalTensor &v_descale

Tensor flash_attention_with_kvcache_cpu(TC_KV_CACHE_ARGUMENTS);
Tensor flash_attention_with_kvcache_cuda(TC_KV_CACHE_ARGUMENTS);

}  // namespace torch_cubin
