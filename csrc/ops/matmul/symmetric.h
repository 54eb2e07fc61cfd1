// Symmetric products: the lower triangle is computed, and mirrored above the diagonal, so that
// every result is symmetric bit by bit.
//
//   syrk(x, c):        alpha * x @ x.mT + beta * c
//   symm_square(a, c): alpha * a @ a + beta * c, where a is meant to be symmetric
//
// Of c, and of a product that is not symmetric, only the lower triangle matters. c is not read if
// beta is 0, nor the product computed if alpha is. The output is float32 or of the operands' dtype,
// and so is c, which broadcasts to it. TORCH_CUBIN_CHECK=1 refuses an `a` or `c` that is not
// symmetric.
#pragma once

#include <optional>

#include "pytorch/tensor.h"

namespace torch_cubin {

Tensor syrk_cpu(const Tensor& x, const std::optional<Tensor>& c, double beta, double alpha,
                const std::optional<ScalarType>& out_dtype);
decltype(syrk_cpu) syrk_cuda;

Tensor symm_square_cpu(const Tensor& a, const std::optional<Tensor>& c, double beta, double alpha,
                       const std::optional<ScalarType>& out_dtype);
decltype(symm_square_cpu) symm_square_cuda;

}  // namespace torch_cubin
