// Products for graphs that fuse more than a bias and an activation. Private ops: graphs call them,
// and _ops/fused.py has their derivatives and batching rules.
//
// On Hopper, 16-bit operands that tensor maps describe take one kernel (sm90_fused.cpp); all others
// are composed of the family's other ops, and then round what lies between in the operands' dtype.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "pytorch/tensor.h"

namespace torch_cubin {

using OptionalTensors = std::vector<std::optional<Tensor>>;
using LinearFunction = Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&);

void check_all_linears(const Tensor& input, const std::vector<Tensor>& weights,
                       const OptionalTensors& biases);

// linears() by `linear`, with the checks of all arguments before the first product.
std::vector<Tensor> linears_one_by_one(const Tensor& input, const std::vector<Tensor>& weights,
                                       const OptionalTensors& biases, LinearFunction* linear);

// activation(input @ gate.t()) * (input @ up.t())
Tensor linear_glu_cpu(const Tensor& input, const Tensor& gate, const Tensor& up,
                      const std::string& activation);
Tensor linear_glu_cuda(const Tensor& input, const Tensor& gate, const Tensor& up,
                       const std::string& activation);

// The same and, for its derivative, the two products, rounded. The result is computed from their
// sums before they are rounded.
std::tuple<Tensor, Tensor, Tensor> linear_glu_aux_cpu(const Tensor& input, const Tensor& gate,
                                                      const Tensor& up,
                                                      const std::string& activation);
std::tuple<Tensor, Tensor, Tensor> linear_glu_aux_cuda(const Tensor& input, const Tensor& gate,
                                                       const Tensor& up,
                                                       const std::string& activation);

// linear(input, weight, bias) for each weight; `biases` may be empty.
std::vector<Tensor> linears_cpu(const Tensor& input, const std::vector<Tensor>& weights,
                                const OptionalTensors& biases);
std::vector<Tensor> linears_cuda(const Tensor& input, const std::vector<Tensor>& weights,
                                 const OptionalTensors& biases);

// linear(input, weight, bias, activation), and what its derivative needs: the sums before the
// activation, rounded.
std::tuple<Tensor, Tensor> linear_activation_aux_cpu(const Tensor& input, const Tensor& weight,
                                                     const std::optional<Tensor>& bias,
                                                     const std::string& activation);
std::tuple<Tensor, Tensor> linear_activation_aux_cuda(const Tensor& input, const Tensor& weight,
                                                      const std::optional<Tensor>& bias,
                                                      const std::string& activation);

// activation'(aux) * (grad @ weight): the gradient of `aux`, the input of an activation, out of
// that of the next layer, whose weight it is.
Tensor linear_activation_backward_cpu(const Tensor& grad, const Tensor& weight, const Tensor& aux,
                                      const std::string& activation);
Tensor linear_activation_backward_cuda(const Tensor& grad, const Tensor& weight, const Tensor& aux,
                                       const std::string& activation);

}  // namespace torch_cubin
