// The matmul family's entry points, as ops_matmul.cpp registers them.
//
// cubin::addmm is beta * input + alpha * (mat1 @ mat2) for all shapes that matmul supports; `input`
// is not read if beta is 0, nor the product computed if alpha is. Results are rounded once, at the
// end.
//
// Each allocates a new contiguous output, except addmm_into, which writes to its first argument.
// The CPU ones are references made of ATen (reference.cpp). The public ops forward to these from
// csrc/ops_matmul.cpp, linear through composite.cpp.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include "pytorch/tensor.h"

namespace torch_cubin {

void linear_composite(StableIValue* stack, uint64_t, uint64_t);
void addmm_dtype_composite(StableIValue* stack, uint64_t, uint64_t);

Tensor matmul_cpu(const Tensor& self, const Tensor& other);
Tensor linear_cpu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias);

Tensor linear_activation_cpu(const Tensor& input, const Tensor& weight,
                             const std::optional<Tensor>& bias, const std::string& activation);
Tensor addmm_cpu(const Tensor& input, const Tensor& mat1, const Tensor& mat2, double beta,
                 double alpha);
Tensor addmm_dtype_cpu(const Tensor& input, const Tensor& mat1, const Tensor& mat2,
                       ScalarType out_dtype, double beta, double alpha);
void addmm_into_cpu(const Tensor& out, const Tensor& mat1, const Tensor& mat2, double beta,
                    double alpha);

std::tuple<Tensor, Tensor> weight_and_bias_gradient_cpu(const Tensor& grad, const Tensor& input);

Tensor matmul_cuda(const Tensor& self, const Tensor& other);
Tensor linear_cuda(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias);
decltype(linear_activation_cpu) linear_activation_cuda;
// linear_activation_cuda() and linear_cuda(), with their bits: of one product if that takes less
// time than two.
std::tuple<Tensor, Tensor> linear_both_cuda(const Tensor& input, const Tensor& weight,
                                            const std::optional<Tensor>& bias,
                                            const std::string& activation);
decltype(addmm_cpu) addmm_cuda;
// `out_dtype` is float32 or the operands' dtype, and so is the input's.
decltype(addmm_dtype_cpu) addmm_dtype_cuda;
// out = beta * out + alpha * (mat1 @ mat2), in out's memory, which is float32 or the operands'
// dtype.
void addmm_into_cuda(const Tensor& out, const Tensor& mat1, const Tensor& mat2, double beta,
                     double alpha);
// The same results, written to `out`: contiguous, of the result's shape and dtype. It shares no
// memory with the factors, and may be the input itself.
void matmul_out_cpu(const Tensor& self, const Tensor& other, const Tensor& out);
void matmul_out_cuda(const Tensor& self, const Tensor& other, const Tensor& out);
void linear_activation_out_cuda(const Tensor& input, const Tensor& weight,
                                const std::optional<Tensor>& bias, const std::string& activation,
                                const Tensor& out);
void addmm_out_cuda(const Tensor& input, const Tensor& mat1, const Tensor& mat2, double beta,
                    double alpha, const Tensor& out);
// Uses one kernel for both if possible: it reads all of grad for the weight's gradient.
std::tuple<Tensor, Tensor> weight_and_bias_gradient_cuda(const Tensor& grad, const Tensor& input);

}  // namespace torch_cubin
