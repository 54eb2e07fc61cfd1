// Argument checks for tensors that C++ cannot read: torch_cubin/_ops calls these for fake tensors
// and under vmap, so that all rules and messages stand in C++ alone.
#include <nlohmann/json.hpp>

#include "c_answer.h"
#include "ops/attention/api/signatures.h"
#include "ops/attention/problem/checks.h"
#include "ops/experts/experts.h"
#include "ops/grouped/grouped.h"
#include "ops/matmul/checks.h"
#include "ops/quantize/quantize.h"
#include "ops/rows/rows.h"
#include "ops/scaled/scaled.h"

using namespace torch_cubin;

// {}, or the error of an attention call (check_described_attention in
// ops/attention/problem/checks.h).
TORCH_CUBIN_API char* torch_cubin_check_attention(const char* call) {
  return answer([&] { check_described_attention(nlohmann::json::parse(given(call, "call"))); });
}

// The same for matmul and linear (check_described_product in ops/matmul/checks.h).
TORCH_CUBIN_API char* torch_cubin_check_product(const char* call) {
  return answer([&] { check_described_product(nlohmann::json::parse(given(call, "call"))); });
}

// The same for grouped_matmul: {"mat_a": tensor, "mat_b": tensor, "offs": tensor}.
TORCH_CUBIN_API char* torch_cubin_check_grouped(const char* call) {
  return answer([&] { check_described_grouped(nlohmann::json::parse(given(call, "call"))); });
}

// The same for scaled_matmul (check_described_scaled in ops/scaled/scaled.h).
TORCH_CUBIN_API char* torch_cubin_check_scaled(const char* call) {
  return answer([&] { check_described_scaled(nlohmann::json::parse(given(call, "call"))); });
}

// The same for scaled_grouped_matmul.
TORCH_CUBIN_API char* torch_cubin_check_scaled_grouped(const char* call) {
  return answer(
      [&] { check_described_scaled_grouped(nlohmann::json::parse(given(call, "call"))); });
}

// The same for quantize (check_described_quantize in ops/quantize/quantize.h).
TORCH_CUBIN_API char* torch_cubin_check_quantize(const char* call) {
  return answer([&] { check_described_quantize(nlohmann::json::parse(given(call, "call"))); });
}

// The same for moe, by its arguments' names.
TORCH_CUBIN_API char* torch_cubin_check_moe(const char* call) {
  return answer([&] { check_described_moe(nlohmann::json::parse(given(call, "call"))); });
}

// The same with weights of 8-bit floats.
TORCH_CUBIN_API char* torch_cubin_check_moe_float8(const char* call) {
  return answer([&] { check_described_moe_float8(nlohmann::json::parse(given(call, "call"))); });
}

// The same for ops over rows (check_described_rows in ops/rows/rows.h).
TORCH_CUBIN_API char* torch_cubin_check_rows(const char* call) {
  return answer([&] { check_described_rows(nlohmann::json::parse(given(call, "call"))); });
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
