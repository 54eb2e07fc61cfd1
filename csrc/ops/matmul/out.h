// The out= variants of the family's ops. They are private: graphs of torch.compile, which own the
// memory, call them (torch_cubin/_inductor/lowerings.py), and the C shims of compiled C++
// (csrc/c_shims.cpp).
//
// `out` must be contiguous, have the result's shape, dtype and device, and share no memory with the
// operands; otherwise they throw [input]. Each works on both devices and returns `out`.
#pragma once

#include <optional>
#include <string>

#include "pytorch/tensor.h"

namespace torch_cubin {

Tensor matmul_to(const Tensor& self, const Tensor& other, Tensor out);
Tensor linear_to(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                 Tensor out);
Tensor linear_activation_to(const Tensor& input, const Tensor& weight,
                            const std::optional<Tensor>& bias, const std::string& activation,
                            Tensor out);
Tensor addmm_to(const Tensor& input, const Tensor& mat1, const Tensor& mat2, double beta,
                double alpha, Tensor out);
Tensor linear_glu_to(const Tensor& input, const Tensor& gate, const Tensor& up,
                     const std::string& activation, Tensor out);

}  // namespace torch_cubin
