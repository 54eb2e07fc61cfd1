// PyTorch's own kernels of layer norm and RMS norm, below its dispatcher. Its C shims lack most of
// them, so that the C++ functions under the shims are called, which take at::Tensor: a handle of
// the stable ABI is the address of one.
#pragma once

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "pytorch/tensor.h"

namespace torch_cubin {

using TwoTensors = std::tuple<Tensor, Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

// Whether this PyTorch has the functions, forward and backward. RMS norm has kernels on CUDA alone.
bool has_aten_layer_norm(bool on_cuda);
bool has_aten_rms_norm();

// Where it has them: as the operators of these names, of which an absent weight or bias may also be
// an undefined tensor.
ThreeTensors aten_native_layer_norm(bool on_cuda, const Tensor& input,
                                    const std::vector<int64_t>& shape,
                                    const std::optional<Tensor>& weight,
                                    const std::optional<Tensor>& bias, double eps);
ThreeTensors aten_native_layer_norm_backward(bool on_cuda, const Tensor& grad_out,
                                             const Tensor& input, const std::vector<int64_t>& shape,
                                             const Tensor& mean, const Tensor& rstd,
                                             const std::optional<Tensor>& weight,
                                             const std::optional<Tensor>& bias,
                                             std::array<bool, 3> wanted);
TwoTensors aten_fused_rms_norm(const Tensor& input, const std::vector<int64_t>& shape,
                               const std::optional<Tensor>& weight, std::optional<double> eps);
TwoTensors aten_fused_rms_norm_backward(const Tensor& grad_out, const Tensor& input,
                                        const std::vector<int64_t>& shape, const Tensor& rstd,
                                        const std::optional<Tensor>& weight,
                                        std::array<bool, 2> wanted);

}  // namespace torch_cubin
