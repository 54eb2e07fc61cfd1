#include "ops/attention/api/signatures.h"

namespace torch_cubin {
namespace {

constexpr const char* kTensors = "Tensor query, Tensor key, Tensor value";
constexpr const char* kForwardResults = "(Tensor out, Tensor logsumexp)";
constexpr const char* kBackwardTensors =
    "Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp";
constexpr const char* kBackwardResults = "(Tensor dq, Tensor dk, Tensor dv)";
constexpr const char* kAllOptions =
    "attn_mask dropout_p is_causal dropout_seed * scale enable_gqa window_left window_right "
    "bottom_right softcap alibi_slopes sinks cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k";

}  // namespace

const AttentionSignature& sdpa_signature() {
  static const AttentionSignature signature(
      kTensors, "attn_mask dropout_p is_causal * scale enable_gqa", "Tensor");
  return signature;
}

const AttentionSignature& raw_sdpa_signature() {
  static const AttentionSignature signature(
      kTensors, "attn_mask dropout_p is_causal dropout_seed * scale enable_gqa", "Tensor");
  return signature;
}

const AttentionSignature& forward_signature() {
  static const AttentionSignature signature(kTensors, kAllOptions, kForwardResults);
  return signature;
}

const AttentionSignature& backward_signature() {
  static const AttentionSignature signature(kBackwardTensors, kAllOptions, kBackwardResults);
  return signature;
}

const AttentionSignature& e4m3_signature() {
  static const AttentionSignature signature(
      kTensors,
      "* is_causal scale window_left window_right bottom_right q_descale k_descale v_descale "
      "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
      kForwardResults);
  return signature;
}

const AttentionSignature& e4m3_backward_signature() {
  static const AttentionSignature signature(
      kBackwardTensors,
      "* is_causal scale window_left window_right bottom_right q_descale k_descale v_descale",
      kBackwardResults);
  return signature;
}

const AttentionSignature& flash_signature() {
  static const AttentionSignature signature(
      "Tensor query, Tensor? key=None, Tensor? value=None",
      "* is_causal scale window_left window_right bottom_right=True softcap alibi_slopes sinks "
      "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p q_descale k_descale v_descale",
      "Tensor");
  return signature;
}

const AttentionSignature& softmax_signature() {
  static const AttentionSignature signature(
      "Tensor scores",
      "attn_mask= alibi_slopes= sinks= scale= softcap= is_causal= window_left= window_right= "
      "bottom_right=",
      "(Tensor probs, Tensor logsumexp)");
  return signature;
}

const AttentionSignature& softmax_backward_signature() {
  static const AttentionSignature signature(
      "Tensor grad, Tensor probs, Tensor? grad_logsumexp, Tensor? scores",
      "scale= softcap=", "Tensor");
  return signature;
}

const AttentionSignature& dropout_signature() {
  static const AttentionSignature signature("Tensor probs", "dropout_seed= dropout_p=", "Tensor");
  return signature;
}

const Signature<KvCacheOptions>& kv_cache_signature() {
  static const Signature<KvCacheOptions> signature(
      "Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache",
      "k v rotary_cos rotary_sin cache_seqlens cache_batch_idx block_table * softmax_scale causal "
      "window_left window_right softcap rotary_interleaved alibi_slopes sinks k_descale v_descale",
      "Tensor");
  return signature;
}

}  // namespace torch_cubin
