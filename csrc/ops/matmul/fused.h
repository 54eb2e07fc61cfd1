// Products for graphs that fuse more than a bias and an activation. They are private ops: graph
// compilers call them, and _ops/fused.py has their derivatives and batching rules.
//
// On Hopper, 16-bit operands that tensor maps can describe use one kernel (sm90_fused.cpp). All
// others are composed of the family's other ops, which round intermediate results to the operands'
// dtype.
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

// linears() as calls of `linear`; checks all arguments before the first product.
std::vector<Tensor> linears_one_by_one(const Tensor& input, const std::vector<Tensor>& weights,
                                       const OptionalTensors& biases, LinearFunction* linear);

// activation(input @ gate.t()) * (input @ up.t())
Tensor linear_glu_cpu(const Tensor& input, const Tensor& gate, const Tensor& up,
                      const std::string& activation);
decltype(linear_glu_cpu) linear_glu_cuda;
// The same, written to `out`: contiguous, of the result's shape and dtype, its own memory.
void linear_glu_out_cuda(const Tensor& input, const Tensor& gate, const Tensor& up,
                         const std::string& activation, const Tensor& out);

// The same and, for its derivative, the two products, rounded. The result is computed from the
// unrounded sums.
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

// linear(input, weight, bias, activation), and the sums before the activation, rounded, which its
// derivative needs.
std::tuple<Tensor, Tensor> linear_activation_aux_cpu(const Tensor& input, const Tensor& weight,
                                                     const std::optional<Tensor>& bias,
                                                     const std::string& activation);
std::tuple<Tensor, Tensor> linear_activation_aux_cuda(const Tensor& input, const Tensor& weight,
                                                      const std::optional<Tensor>& bias,
                                                      const std::string& activation);

// activation'(aux) * (grad @ weight): the gradient with respect to `aux`, the input of an
// activation, given `grad` and `weight` of the next layer.
Tensor linear_activation_backward_cpu(const Tensor& grad, const Tensor& weight, const Tensor& aux,
                                      const std::string& activation);
decltype(linear_activation_backward_cpu) linear_activation_backward_cuda;

}  // namespace torch_cubin
