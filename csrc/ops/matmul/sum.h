// A product with a sum on CUDA, for ops that differ in what they check and in what they know of the
// result.
#pragma once

#include "ops/common/shape.h"
#include "ops/matmul/problem.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// alpha * (a @ b) + beta * input, as addmm_dtype_cuda, whose arguments are checked. `shape` is the
// result's; with Symmetry::kLower it is square, and only the lower triangle matters.
Tensor sum_cuda(const Tensor& input, const TensorView& a, const TensorView& b, const Shape& shape,
                ScalarType out_dtype, double beta, double alpha, Symmetry symmetry);

}  // namespace torch_cubin
