#include "ops/matmul/elementwise.h"

#include <string>
#include <vector>

#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"

namespace torch_cubin {
namespace {

// As kernels take it, in the type of the sums: too large a one is infinite. ATen would refuse it.
double factor_of(const Tensor& sums, double factor) {
  return TensorView(sums).dtype == ScalarType::Double ? factor : static_cast<float>(factor);
}

}  // namespace

Tensor apply_activation(const Tensor& x, Activation activation) {
  switch (activation) {
    case kActivationRelu:
      return call_aten("aten::relu", x);
    case kActivationGelu:
      return call_aten("aten::gelu", x, std::string("none"));
    case kActivationGeluTanh:
      return call_aten("aten::gelu", x, std::string("tanh"));
    case kActivationSilu:
      return call_aten("aten::silu", x);
    default:
      return x;
  }
}

Tensor activated_copy(const Tensor& x, Activation activation) {
  return activation == kActivationNone ? torch::stable::clone(x) : apply_activation(x, activation);
}

Tensor apply_activation_backward(const Tensor& grad, const Tensor& x, Activation activation) {
  switch (activation) {
    case kActivationRelu: {
      Tensor zero = torch::stable::new_empty(x, std::vector<int64_t>{});
      torch::stable::zero_(zero);
      const auto none = call_aten_overload("aten::le", "Tensor", x, zero);
      return call_aten_overload("aten::masked_fill", "Tensor", grad, none, zero);
    }
    case kActivationGelu:
      return call_aten("aten::gelu_backward", grad, x, std::string("none"));
    case kActivationGeluTanh:
      return call_aten("aten::gelu_backward", grad, x, std::string("tanh"));
    case kActivationSilu:
      return call_aten("aten::silu_backward", grad, x);
    default:
      return grad;
  }
}

Tensor multiplied(const Tensor& x, const Tensor& y) {
  return call_aten_overload("aten::mul", "Tensor", x, y);
}

Tensor wide(const Tensor& tensor) {
  const bool is_16_bit = element_size(TensorView(tensor).dtype) == 2;
  return is_16_bit ? torch::stable::to(detach(tensor), ScalarType::Float) : detach(tensor);
}

Tensor narrow_to(const Tensor& tensor, ScalarType dtype) {
  return TensorView(tensor).dtype == dtype ? tensor : torch::stable::to(tensor, dtype);
}

// NOTE: the stable ABI has no Scalar; only subtract() takes a factor.
Tensor scaled_addend(const Tensor& x, const Tensor& addend, double beta) {
  return beta == 0 ? x : torch::stable::subtract(x, addend, -factor_of(x, beta));
}

Tensor scaled(const Tensor& x, double alpha) {
  if (alpha == 1) return x;
  Tensor zeros = torch::stable::empty_like(x);
  torch::stable::zero_(zeros);
  return torch::stable::subtract(zeros, x, -factor_of(x, alpha));
}

}  // namespace torch_cubin
