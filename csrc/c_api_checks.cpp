// Argument checks for tensors that C++ cannot read: torch_cubin/_ops calls these for fake tensors
// and under vmap, so that all rules and messages stand in C++ alone.
#include <nlohmann/json.hpp>

#include "c_answer.h"
#include "cubin/error.h"
#include "ops/attention/api/signatures.h"
#include "ops/attention/problem/arguments.h"
#include "ops/experts/experts.h"
#include "ops/grouped/grouped.h"
#include "ops/matmul/checks.h"
#include "ops/quantize/quantize.h"
#include "ops/rows/rows.h"
#include "ops/scaled/scaled.h"

using namespace torch_cubin;

namespace {

// The checks of calls that are described in JSON; each says where it is declared what it reads.
constexpr struct {
  const char* name;
  void (*check)(const nlohmann::json& call);
} kChecks[] = {
    {"attention", check_described_attention},
    {"product", check_described_product},
    {"grouped", check_described_grouped},
    {"scaled", check_described_scaled},
    {"scaled_grouped", check_described_scaled_grouped},
    {"scaled_gated", check_described_scaled_gated},
    {"quantize", check_described_quantize},
    {"moe", check_described_moe},
    {"moe_float8", check_described_moe_float8},
    {"rows", check_described_rows},
};

void check_described(const std::string& name, const nlohmann::json& call) {
  for (const auto& each : kChecks) {
    if (name == each.name) return each.check(call);
  }
  fail({"internal", "a described call", "has no checks", "a name of kChecks", name, ""});
}

}  // namespace

// {}, or the error of a described call.
TORCH_CUBIN_API char* torch_cubin_check_described(const char* name, const char* call) {
  return answer(
      [&] { check_described(given(name, "name"), nlohmann::json::parse(given(call, "call"))); });
}

// {"attention_forward": its schema, ...}: torch_cubin/_ops takes the options and their defaults
// from here, which must not depend on PyTorch's private names.
TORCH_CUBIN_API char* torch_cubin_attention_schemas() {
  return answer([] {
    return nlohmann::json{
        {"attention_forward", forward_signature().schema("attention_forward")},
        {"_attention_softmax", softmax_signature().schema("_attention_softmax")},
        {"attention_forward_e4m3", e4m3_signature().schema("attention_forward_e4m3")},
        {"flash_attention_with_kvcache",
         kv_cache_signature().schema("flash_attention_with_kvcache")}};
  });
}
