#include "ops/matmul/elementwise.h"

#include <torch/csrc/stable/ops.h>

#include <string>

#include "ops/common/aten.h"

namespace torch_cubin {

using torch::stable::detail::from;

Tensor apply_activation(const Tensor& x, Activation activation) {
  switch (activation) {
    case kActivationRelu: {
      StableIValue stack[] = {from(x)};
      return call_aten("aten::relu", stack);
    }
    case kActivationGelu:
    case kActivationGeluTanh: {
      const std::string approximate = activation == kActivationGelu ? "none" : "tanh";
      StableIValue stack[] = {from(x), from(approximate)};
      return call_aten("aten::gelu", stack);
    }
    case kActivationSilu: {
      StableIValue stack[] = {from(x)};
      return call_aten("aten::silu", stack);
    }
    default:
      return x;
  }
}

// NOTE: the stable ABI has no Scalar; subtract() alone takes a factor.
Tensor scaled_addend(const Tensor& x, const Tensor& addend, double beta) {
  return beta == 0 ? x : torch::stable::subtract(x, addend, -beta);
}

Tensor scaled(const Tensor& x, double alpha) {
  if (alpha == 1) return x;
  Tensor zeros = torch::stable::empty_like(x);
  torch::stable::zero_(zeros);
  return torch::stable::subtract(zeros, x, -alpha);
}

}  // namespace torch_cubin
