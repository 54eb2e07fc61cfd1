// What an epilogue computes, by ATen: for the CPU references, and where there is no product.
#pragma once

#include "kernels/matmul/activation_params.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// activation(x), which may be x itself.
Tensor apply_activation(const Tensor& x, Activation activation);

// x + beta * addend, which broadcasts to x and is not read where beta is 0.
Tensor scaled_addend(const Tensor& x, const Tensor& addend, double beta);

// alpha * x
Tensor scaled(const Tensor& x, double alpha);

}  // namespace torch_cubin
