#include "ops/attention/api/signatures.h"

#include <nlohmann/json.hpp>

#include "ops/attention/problem/kv_cache.h"
#include "pytorch/described_tensor.h"

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

#define TC_SIGNATURE(Type, name, ...)         \
  const Type& name() {                        \
    static const Type signature(__VA_ARGS__); \
    return signature;                         \
  }

TC_SIGNATURE(AttentionSignature, sdpa_signature, kTensors,
             "attn_mask dropout_p is_causal * scale enable_gqa", "Tensor")

TC_SIGNATURE(AttentionSignature, raw_sdpa_signature, kTensors,
             "attn_mask dropout_p is_causal dropout_seed * scale enable_gqa", "Tensor")

TC_SIGNATURE(AttentionSignature, forward_signature, kTensors, kAllOptions, kForwardResults)

TC_SIGNATURE(AttentionSignature, backward_signature, kBackwardTensors, kAllOptions,
             kBackwardResults)

TC_SIGNATURE(
    AttentionSignature, e4m3_signature, kTensors,
    "* is_causal scale window_left window_right bottom_right q_descale k_descale v_descale "
    "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    kForwardResults)

TC_SIGNATURE(
    AttentionSignature, e4m3_backward_signature, kBackwardTensors,
    "* is_causal scale window_left window_right bottom_right q_descale k_descale v_descale",
    kBackwardResults)

TC_SIGNATURE(
    AttentionSignature, flash_signature, "Tensor query, Tensor? key=None, Tensor? value=None",
    "* is_causal scale window_left window_right bottom_right=True softcap alibi_slopes sinks "
    "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p q_descale k_descale v_descale",
    "Tensor")

TC_SIGNATURE(
    AttentionSignature, softmax_signature, "Tensor scores",
    "attn_mask= alibi_slopes= sinks= scale= softcap= is_causal= window_left= window_right= "
    "bottom_right=",
    "(Tensor probs, Tensor logsumexp)")

TC_SIGNATURE(AttentionSignature, softmax_backward_signature,
             "Tensor grad, Tensor probs, Tensor? grad_logsumexp, Tensor? scores",
             "scale= softcap=", "Tensor")

TC_SIGNATURE(AttentionSignature, dropout_signature, "Tensor probs",
             "dropout_seed= dropout_p=", "Tensor")

TC_SIGNATURE(
    Signature<KvCacheOptions>, kv_cache_signature,
    "Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache",
    "k v rotary_cos rotary_sin cache_seqlens cache_batch_idx block_table * softmax_scale causal "
    "window_left window_right softcap rotary_interleaved alibi_slopes sinks k_descale v_descale",
    "Tensor")

#undef TC_SIGNATURE

namespace {

// The options of a described call: tensors together with the other tensors, numbers separately.
// Scale is omitted, because no check depends on it.
struct DescribedOptions {
  const nlohmann::json &tensors, &numbers;
  DescribedTensors& known;

  void read(const char* name, std::optional<TensorView>& option) {
    option = known.find(tensors, name);
  }
  void read(const char* name, double& option) { option = described_float(numbers.at(name)); }
  void read(const char* name, bool& option) { option = numbers.at(name).get<bool>(); }
  void read(const char* name, int64_t& option) { option = numbers.at(name).get<int64_t>(); }
  void read(const char*, std::optional<double>&) {}
};

void check_described_kv_cache(const nlohmann::json& tensors, DescribedOptions& described) {
  const auto get = [&](const char* name) { return described.known.view(tensors.at(name)); };
  KvCacheViews views{{}, get("q"), get("k_cache"), get("v_cache")};
#define TC_READ(type, name, ...) described.read(#name, views.name);
  TC_KV_CACHE_OPTIONS(TC_READ)
  check_kv_cache(views);
}

}  // namespace

void check_described_attention(const nlohmann::json& call) {
  const auto op = call.at("op").get<std::string>();
  const nlohmann::json& tensors = call.at("tensors");
  DescribedTensors known;
  DescribedOptions described{tensors, call.at("options"), known};
  if (op == "flash_attention_with_kvcache") return check_described_kv_cache(tensors, described);
  AttentionViews views;
  TC_ATTENTION_OPTIONS(TC_READ)
#undef TC_READ
  views.e4m3 = op == "attention_forward_e4m3" || op == "attention_backward_e4m3";
  const auto get = [&](const char* name) { return known.view(tensors.at(name)); };
  const TensorView query = get("query");
  const AttentionShape shape = check_attention(op.c_str(), query, get("key"), get("value"), views);
  attention_settings(op.c_str(), shape, views);
  if (const auto grad_out = known.find(tensors, "grad_out")) {
    check_attention_backward(op.c_str(), shape, query, *grad_out, get("out"), get("logsumexp"));
  }
}

}  // namespace torch_cubin
