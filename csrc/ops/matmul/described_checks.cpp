// The checks of matmul and linear for a call with its tensors' metadata only.
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "ops/matmul/checks.h"
#include "pytorch/described_tensor.h"

namespace torch_cubin {

namespace {

// The operand's where the call names none.
ScalarType out_dtype_of(const nlohmann::json& call, const TensorView& operand) {
  ScalarType out_dtype = operand.dtype;
  if (call.contains("out_dtype")) find_dtype(call.at("out_dtype").get<std::string>(), &out_dtype);
  return out_dtype;
}

}  // namespace

void check_described_product(const nlohmann::json& call) {
  const auto op = call.at("op").get<std::string>();
  const nlohmann::json& named = call.at("tensors");
  DescribedTensors tensors;
  const auto get = [&](const char* name) { return tensors.view(named.at(name)); };
  if (op == "matmul") {
    check_matmul(get("self"), get("other"));
  } else if (op == "addmm") {
    const TensorView mat1 = get("mat1");
    check_addmm(get("input"), mat1, get("mat2"), out_dtype_of(call, mat1));
  } else if (op == "syrk" || op == "symm_square") {
    const TensorView operand = get(op == "syrk" ? "x" : "a");
    check_symmetric_product(op, operand, tensors.find(named, "c"), out_dtype_of(call, operand));
  } else if (op == "addmm_into") {
    check_addmm_into(get("out"), get("mat1"), get("mat2"));
  } else if (op == "_linear_glu") {
    check_linear_glu(get("input"), get("gate"), get("up"));
  } else if (op == "_linears") {
    check_linears(get("input"), get("weight"), tensors.find(named, "bias"),
                  call.at("index").get<int64_t>());
  } else if (op == "_linear_activation_backward") {
    check_linear_activation_backward(get("grad"), get("weight"), get("aux"));
  } else if (op == "linear") {
    check_linear(get("input"), get("weight"), tensors.find(named, "bias"));
  } else {
    fail({"internal", op, "is no product that can be described", "", "", ""});
  }
}

}  // namespace torch_cubin
