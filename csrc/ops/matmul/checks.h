// What matmul, linear and addmm require of their arguments, checked alike on every device.
//
// Each function throws [input] with what was expected and what came; they return the output's
// shape, which is the only thing both devices compute alike.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "kernels/matmul/activation_params.h"
#include "ops/common/shape.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// Shape of torch.matmul(self, other).
Shape check_matmul(const TensorView& self, const TensorView& other);

// Shape of addmm(input, mat1, mat2): that of matmul, to which `input` broadcasts.
Shape check_addmm(const TensorView& input, const TensorView& mat1, const TensorView& mat2);

// Throws where no activation has this name.
Activation check_activation(const std::string& name);

// Shape of F.linear(input, weight, bias).
Shape check_linear(const TensorView& input, const TensorView& weight,
                   const std::optional<TensorView>& bias);

// Shape of the weight's gradient, (outputs, inputs), of a linear layer of rows.
Shape check_weight_gradient(const TensorView& grad, const TensorView& input);

// The same for a call whose tensors are described: {"op": ..., "tensors": {name: ...}}.
void check_described_product(const nlohmann::json& call);

}  // namespace torch_cubin
