// The checks of the arguments of matmul, linear and addmm, the same on every device.
//
// Each function throws [input] with the expected and the given value, and returns the output's
// shape, the only thing that both devices compute.
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

// Shape of addmm(input, mat1, mat2): that of matmul, to which `input` broadcasts. `out_dtype` is
// the output's: the operands', or float32 for 16-bit ones.
Shape check_addmm(const TensorView& input, const TensorView& mat1, const TensorView& mat2,
                  ScalarType out_dtype);

// The same for addmm_into(out, mat1, mat2), which writes to `out`.
Shape check_addmm_into(const TensorView& out, const TensorView& mat1, const TensorView& mat2);

// Shape of syrk and symm_square (ops/matmul/symmetric.h), of `operand` with itself.
Shape check_symmetric_product(const std::string& op, const TensorView& operand,
                              const std::optional<TensorView>& c, ScalarType out_dtype);

// Throws if no activation has this name, an argument of `op`.
Activation check_activation(const std::string& name, const char* op = "linear");

// Shape of F.linear(input, weight, bias).
Shape check_linear(const TensorView& input, const TensorView& weight,
                   const std::optional<TensorView>& bias);

// Shape of a linear layer's weight gradient, (outputs, inputs), for inputs that are rows.
Shape check_weight_gradient(const TensorView& grad, const TensorView& input);

// Shape of _linear_glu(input, gate, up); checks `up` too.
Shape check_linear_glu(const TensorView& input, const TensorView& gate, const TensorView& up);

// Shape of the product of _linears with weight number `index`.
Shape check_linears(const TensorView& input, const TensorView& weight,
                    const std::optional<TensorView>& bias, int64_t index);

// Throws unless there are weights, and either as many biases or none.
void check_linears_counts(int64_t weights, int64_t biases);

// Shape of _linear_activation_backward(grad, weight, aux), which is aux's.
Shape check_linear_activation_backward(const TensorView& grad, const TensorView& weight,
                                       const TensorView& aux);

// The same for a call whose tensors are described: {"op": ..., "tensors": {name: ...}}.
void check_described_product(const nlohmann::json& call);

}  // namespace torch_cubin
