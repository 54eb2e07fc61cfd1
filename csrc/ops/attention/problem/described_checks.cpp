// The checks of attention for a call of which only its tensors' metadata are known.
#include <nlohmann/json.hpp>

#include "ops/attention/problem/checks.h"
#include "ops/attention/problem/kv_cache.h"
#include "pytorch/described_tensor.h"

namespace torch_cubin {

void check_described_attention(const nlohmann::json& call) {
  const auto op = call.at("op").get<std::string>();
  if (op == "flash_attention_with_kvcache") return check_described_kv_cache(call);
  const nlohmann::json& given = call.at("options");
  AttentionOptions options;
  options.dropout_p = described_float(given.at("dropout_p"));
  options.softcap = described_float(given.at("softcap"));
  options.is_causal = given.at("is_causal").get<bool>();
  options.enable_gqa = given.at("enable_gqa").get<bool>();
  options.window_left = given.at("window_left").get<int64_t>();
  options.window_right = given.at("window_right").get<int64_t>();
  options.max_seqlen_q = given.at("max_seqlen_q").get<int64_t>();
  options.max_seqlen_k = given.at("max_seqlen_k").get<int64_t>();
  const nlohmann::json& named = call.at("tensors");
  DescribedTensors tensors;
  const auto find = [&](const char* name) { return tensors.find(named, name); };
  const auto get = [&](const char* name) { return tensors.view(named.at(name)); };
  const AttentionViews views{find("attn_mask"), find("dropout_seed"), find("alibi_slopes"),
                             find("sinks"),     find("cu_seqlens_q"), find("cu_seqlens_k"),
                             find("q_descale"), find("k_descale"),    find("v_descale")};
  options.e4m3 = op == "attention_forward_e4m3";
  const TensorView query = get("query");
  const AttentionShape shape =
      check_attention(op.c_str(), query, get("key"), get("value"), options, views);
  attention_settings(op.c_str(), shape, options, views);
  if (const auto grad_out = find("grad_out")) {
    check_attention_backward(shape, query, *grad_out, get("out"), get("logsumexp"));
  }
}

}  // namespace torch_cubin
