// The C API of checks for calls whose tensors C++ cannot read: torch_cubin/_ops asks here for fake
// tensors and under vmap, so that every rule and every message is C++'s.
#include <nlohmann/json.hpp>

#include "c_answer.h"
#include "ops/attention/checks.h"
#include "ops/matmul/checks.h"

using namespace torch_cubin;

// {}, or the error that the call of an attention op would raise (check_described_attention in
// ops/attention/checks.h).
TORCH_CUBIN_API char* torch_cubin_check_attention(const char* call) {
  return answer([&] { check_described_attention(nlohmann::json::parse(given(call, "call"))); });
}

// The same of matmul and linear (check_described_product in ops/matmul/checks.h).
TORCH_CUBIN_API char* torch_cubin_check_product(const char* call) {
  return answer([&] { check_described_product(nlohmann::json::parse(given(call, "call"))); });
}
