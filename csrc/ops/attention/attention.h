// The attention family's entry points, as ops_attention.cpp registers them, and what they share.
//
// Each allocates fresh outputs whose dims lie in memory in the order of query's (output_strides in
// checks.h). The CPU ones are references made of ATen (reference.cpp). The public ops forward to
// these from csrc/ops_attention.cpp, scaled_dot_product_attention through composite.cpp and
// flash_attention through flash_attention.cpp.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include "pytorch/tensor.h"

namespace torch_cubin {

using OptionalTensor = std::optional<Tensor>;

// What a user passes besides the tensors that carry gradients; see the schemas in
// ops_attention.cpp.
struct AttentionOptions {
  OptionalTensor attn_mask;
  double dropout_p = 0;
  bool is_causal = false;
  OptionalTensor dropout_seed;
  std::optional<double> scale;
  bool enable_gqa = false;
  int64_t window_left = -1, window_right = -1;
  bool bottom_right = false;
  double softcap = 0;
  OptionalTensor alibi_slopes{}, sinks{}, cu_seqlens_q{}, cu_seqlens_k{};
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;
  // Query, key and value of float8_e4m3fn; the output is then bfloat16. What they are multiplied
  // by: float32 (batch, heads of key), none: 1.
  bool e4m3 = false;
  OptionalTensor q_descale{}, k_descale{}, v_descale{};
};

// The same as numbers, ready for a kernel; defaults resolved, ranges checked.
struct AttentionSettings {
  double scale = 1;
  double softcap = 0;         // 0: none
  int first = 0, last = 0;    // row i sees columns i + first .. i + last (kNoBound: open)
  bool bottom_right = false;  // the band is shifted by seqlen_k - seqlen_q
  int drop_below = 0;         // dropout: a 16-bit random number below this drops a weight
  double keep_scale = 1;      // 1 / kept fraction; 0 where all are dropped
};

// AttentionSettings::keep_scale for a drop_below.
inline double keep_scale_of(int drop_below) {
  return drop_below < 65536 ? 65536.0 / (65536 - drop_below) : 0;
}

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

}  // namespace torch_cubin
