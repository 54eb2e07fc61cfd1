// The computations of an epilogue in ATen, for the CPU references, and for calls without a product.
#pragma once

#include "kernels/matmul/activation_params.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// activation(x), which may be x itself.
Tensor apply_activation(const Tensor& x, Activation activation);

// The same, always in a new tensor.
Tensor activated_copy(const Tensor& x, Activation activation);

// grad * activation'(x)
Tensor apply_activation_backward(const Tensor& grad, const Tensor& x, Activation activation);

Tensor multiplied(const Tensor& x, const Tensor& y);

// The tensor in the dtype of an epilogue's computations, so that results are rounded once;
// detached.
Tensor wide(const Tensor& tensor);

Tensor narrow_to(const Tensor& tensor, ScalarType dtype);

// x + beta * addend, which broadcasts to x and is not read if beta is 0.
Tensor scaled_addend(const Tensor& x, const Tensor& addend, double beta);

// alpha * x
Tensor scaled(const Tensor& x, double alpha);

}  // namespace torch_cubin
