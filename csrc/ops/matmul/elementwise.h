// What an epilogue computes, by ATen: for the CPU references, and where there is no product.
#pragma once

#include "kernels/matmul/activation_params.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// activation(x), which may be x itself.
Tensor apply_activation(const Tensor& x, Activation activation);

// The same in memory of its own.
Tensor activated_copy(const Tensor& x, Activation activation);

// grad * activation'(x)
Tensor apply_activation_backward(const Tensor& grad, const Tensor& x, Activation activation);

Tensor multiplied(const Tensor& x, const Tensor& y);

// What an epilogue is computed in, so that results are rounded once; without derivatives.
Tensor wide(const Tensor& tensor);

Tensor narrow_to(const Tensor& tensor, ScalarType dtype);

// x + beta * addend, which broadcasts to x and is not read where beta is 0.
Tensor scaled_addend(const Tensor& x, const Tensor& addend, double beta);

// alpha * x
Tensor scaled(const Tensor& x, double alpha);

}  // namespace torch_cubin
