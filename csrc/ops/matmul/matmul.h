// The matmul family's entry points, as ops.cpp registers them.
//
// Each allocates a fresh contiguous output. The CPU ones are references made of ATen
// (reference.cpp); the public ops that forward to these are in composite.cpp.
#pragma once

#include <optional>

#include "pytorch/tensor.h"

namespace torch_cubin {

Tensor matmul_cpu(const Tensor& self, const Tensor& other);
Tensor linear_cpu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias);

Tensor matmul_cuda(const Tensor& self, const Tensor& other);
Tensor linear_cuda(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias);

}  // namespace torch_cubin
