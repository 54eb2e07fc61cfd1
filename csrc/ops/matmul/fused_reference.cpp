// The products for graphs on the CPU: references made of the family's references and ATen.
#include "ops/common/stable_ops.h"
#include "ops/matmul/checks.h"
#include "ops/matmul/elementwise.h"
#include "ops/matmul/fused.h"
#include "ops/matmul/matmul.h"

namespace torch_cubin {
namespace {

std::optional<Tensor> wide_or_none(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional<Tensor>(wide(*tensor)) : std::nullopt;
}

// activation(input @ weight.t() + bias) in the dtype of the sums.
Tensor activated_sums(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                      const std::string& activation) {
  return linear_activation_cpu(wide(input), wide(weight), wide_or_none(bias), activation);
}

Tensor sums_of(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  return linear_cpu(wide(input), wide(weight), wide_or_none(bias));
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> linear_glu_aux_cpu(const Tensor& input, const Tensor& gate,
                                                      const Tensor& up,
                                                      const std::string& activation) {
  check_linear_glu(TensorView(input), TensorView(gate), TensorView(up));
  check_activation(activation);
  const ScalarType dtype = TensorView(input).dtype;
  const Tensor of_gate = sums_of(input, gate, {}), of_up = sums_of(input, up, {});
  const Tensor out = multiplied(activated_sums(input, gate, {}, activation), of_up);
  return {narrow_to(out, dtype), narrow_to(of_gate, dtype), narrow_to(of_up, dtype)};
}

Tensor linear_glu_cpu(const Tensor& input, const Tensor& gate, const Tensor& up,
                      const std::string& activation) {
  return std::get<0>(linear_glu_aux_cpu(input, gate, up, activation));
}

std::vector<Tensor> linears_cpu(const Tensor& input, const std::vector<Tensor>& weights,
                                const OptionalTensors& biases) {
  return linears_one_by_one(input, weights, biases, linear_cpu);
}

std::tuple<Tensor, Tensor> linear_activation_aux_cpu(const Tensor& input, const Tensor& weight,
                                                     const std::optional<Tensor>& bias,
                                                     const std::string& activation) {
  const Tensor out = linear_activation_cpu(input, weight, bias, activation);
  const Tensor sums = sums_of(input, weight, bias);
  return {out, narrow_to(sums, TensorView(input).dtype)};
}

Tensor linear_activation_backward_cpu(const Tensor& grad, const Tensor& weight, const Tensor& aux,
                                      const std::string& activation) {
  const TensorView g(grad);
  check_linear_activation_backward(g, TensorView(weight), TensorView(aux));
  const Activation known = check_activation(activation);
  const Tensor sums = matmul_cpu(wide(grad), wide(weight));
  const Tensor before = torch::stable::contiguous(wide(aux));
  return narrow_to(apply_activation_backward(sums, before, known), g.dtype);
}

}  // namespace torch_cubin
