// Our kernels of aten's layer norm and RMS norm, for install() and drop_in(). ops/common/serving.h
// says which calls are served.
#pragma once

#include <optional>
#include <vector>

#include "pytorch/aten_norms.h"

namespace torch_cubin {

ThreeTensors aten_layer_norm(const Tensor& input, const std::vector<int64_t>& normalized_shape,
                             const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                             double eps);
ThreeTensors aten_layer_norm_backward(const Tensor& grad_out, const Tensor& input,
                                      const std::vector<int64_t>& normalized_shape,
                                      const Tensor& mean, const Tensor& rstd,
                                      const std::optional<Tensor>& weight,
                                      const std::optional<Tensor>& bias,
                                      const std::vector<bool>& output_mask);
TwoTensors aten_rms_norm(const Tensor& input, const std::vector<int64_t>& normalized_shape,
                         const std::optional<Tensor>& weight, std::optional<double> eps);
TwoTensors aten_rms_norm_backward(const Tensor& grad_out, const Tensor& input,
                                  const std::vector<int64_t>& normalized_shape, const Tensor& rstd,
                                  const std::optional<Tensor>& weight,
                                  const std::vector<bool>& output_mask);

}  // namespace torch_cubin
