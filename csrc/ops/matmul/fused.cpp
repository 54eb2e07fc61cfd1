// The products for graphs on CUDA: one kernel where sm90_fused.cpp takes them, else composed.
#include "ops/matmul/fused.h"

#include "ops/common/stable_ops.h"
#include "ops/matmul/checks.h"
#include "ops/matmul/elementwise.h"
#include "ops/matmul/matmul.h"

namespace torch_cubin {

std::vector<Tensor> linears_one_by_one(const Tensor& input, const std::vector<Tensor>& weights,
                                       const OptionalTensors& biases, LinearFunction* linear) {
  const TensorView x(input);
  const auto count = static_cast<int64_t>(weights.size());
  check_linears_counts(count, static_cast<int64_t>(biases.size()));
  const auto bias = [&](int64_t i) { return biases.empty() ? std::nullopt : biases[i]; };
  for (int64_t i = 0; i < count; ++i) {  // all of them before the first product
    check_linears(x, TensorView(weights[i]), view_of(bias(i)), i);
  }
  std::vector<Tensor> out;
  out.reserve(weights.size());
  for (int64_t i = 0; i < count; ++i) out.push_back(linear(input, weights[i], bias(i)));
  return out;
}

Tensor linear_glu_cuda(const Tensor& input, const Tensor& gate, const Tensor& up,
                       const std::string& activation) {
  check_linear_glu(TensorView(input), TensorView(gate), TensorView(up));
  const Tensor activated = linear_activation_cuda(input, gate, {}, activation);
  return multiplied(activated, linear_cuda(input, up, {}));
}

std::tuple<Tensor, Tensor, Tensor> linear_glu_aux_cuda(const Tensor& input, const Tensor& gate,
                                                       const Tensor& up,
                                                       const std::string& activation) {
  check_linear_glu(TensorView(input), TensorView(gate), TensorView(up));
  const Activation known = check_activation(activation);
  const Tensor of_gate = linear_cuda(input, gate, {}), of_up = linear_cuda(input, up, {});
  return {multiplied(apply_activation(of_gate, known), of_up), of_gate, of_up};
}

std::vector<Tensor> linears_cuda(const Tensor& input, const std::vector<Tensor>& weights,
                                 const OptionalTensors& biases) {
  return linears_one_by_one(input, weights, biases, linear_cuda);
}

std::tuple<Tensor, Tensor> linear_activation_aux_cuda(const Tensor& input, const Tensor& weight,
                                                      const std::optional<Tensor>& bias,
                                                      const std::string& activation) {
  const Activation known = check_activation(activation);
  const Tensor aux = linear_cuda(input, weight, bias);
  return {activated_copy(aux, known), aux};
}

Tensor linear_activation_backward_cuda(const Tensor& grad, const Tensor& weight, const Tensor& aux,
                                       const std::string& activation) {
  check_linear_activation_backward(TensorView(grad), TensorView(weight), TensorView(aux));
  const Activation known = check_activation(activation);
  const Tensor before = torch::stable::contiguous(aux);
  return apply_activation_backward(matmul_cuda(grad, weight), before, known);
}

}  // namespace torch_cubin
