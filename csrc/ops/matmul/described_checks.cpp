// The checks of matmul and linear for a call of which only its tensors' metadata are known.
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "ops/matmul/checks.h"
#include "pytorch/described_tensor.h"

namespace torch_cubin {

void check_described_product(const nlohmann::json& call) {
  const auto op = call.at("op").get<std::string>();
  const nlohmann::json& named = call.at("tensors");
  DescribedTensors tensors;
  const auto get = [&](const char* name) { return tensors.view(named.at(name)); };
  if (op == "matmul") {
    check_matmul(get("self"), get("other"));
  } else if (op == "addmm") {
    check_addmm(get("input"), get("mat1"), get("mat2"));
  } else if (op == "linear") {
    check_linear(get("input"), get("weight"), tensors.find(named, "bias"));
  } else {
    fail({"internal", op, "is no product that can be described", "", "", ""});
  }
}

}  // namespace torch_cubin
