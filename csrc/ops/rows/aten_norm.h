// Our kernels of aten's layer norm and RMS norm, for install() and drop_in(). ops/common/serving.h
// says which calls are served.
#pragma once

#include <optional>
#include <vector>

#include "pytorch/aten_norms.h"

namespace torch_cubin {

ThreeTensors aten_layer_norm(const Tensor& input, std::vector<int64_t> normalized_shape,
                             std::optional<Tensor> weight, std::optional<Tensor> bias, double eps);
ThreeTensors aten_layer_norm_backward(const Tensor& grad_out, const Tensor& input,
                                      std::vector<int64_t> normalized_shape, const Tensor& mean,
                                      const Tensor& rstd, std::optional<Tensor> weight,
                                      std::optional<Tensor> bias, std::vector<bool> output_mask);
TwoTensors aten_rms_norm(const Tensor& input, std::vector<int64_t> normalized_shape,
                         std::optional<Tensor> weight, std::optional<double> eps);
TwoTensors aten_rms_norm_backward(const Tensor& grad_out, const Tensor& input,
                                  std::vector<int64_t> normalized_shape, const Tensor& rstd,
                                  std::optional<Tensor> weight, std::vector<bool> output_mask);

}  // namespace torch_cubin
