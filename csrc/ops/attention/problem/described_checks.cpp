// The checks of attention for a call of which only the tensors' metadata is known.
#include <nlohmann/json.hpp>

#include "ops/attention/problem/checks.h"
#include "ops/attention/problem/kv_cache.h"
#include "pytorch/described_tensor.h"

namespace torch_cubin {

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
