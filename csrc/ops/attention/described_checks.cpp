// The checks of attention for a call of which only its tensors' metadata are known.
#include <nlohmann/json.hpp>

#include "ops/attention/checks.h"
#include "pytorch/described_tensor.h"

namespace torch_cubin {

void check_described_attention(const nlohmann::json& call) {
  const auto op = call.at("op").get<std::string>();
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
  DescribedTensors tensors(call.at("tensors"));
  const AttentionViews views{tensors.find("attn_mask"),    tensors.find("dropout_seed"),
                             tensors.find("alibi_slopes"), tensors.find("sinks"),
                             tensors.find("cu_seqlens_q"), tensors.find("cu_seqlens_k")};
  const TensorView query = tensors.get("query");
  const AttentionShape shape =
      check_attention(op.c_str(), query, tensors.get("key"), tensors.get("value"), options, views);
  attention_settings(op.c_str(), shape, options, views);
  if (const auto grad_out = tensors.find("grad_out")) {
    check_attention_backward(shape, query, *grad_out, tensors.get("out"), tensors.get("logsumexp"));
  }
}

}  // namespace torch_cubin
