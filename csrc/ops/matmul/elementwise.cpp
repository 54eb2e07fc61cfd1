#include "ops/matmul/elementwise.h"

#include <string>

#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"

namespace torch_cubin {

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
