// Our kernel of aten::_scaled_grouped_mm, and of _scaled_grouped_mm_v2 with scales of rows, for
// install() and drop_in(); ops/common/serving.h says which calls are served.
#pragma once

#include <optional>
#include <vector>

#include "pytorch/tensor.h"

namespace torch_cubin {

// The product, or nothing if the call is left to PyTorch.
std::vector<Tensor> aten_scaled_grouped_mm(const Tensor& self, const Tensor& mat2,
                                           const Tensor& scale_a, const Tensor& scale_b,
                                           const std::optional<Tensor>& offs,
                                           const std::optional<Tensor>& bias,
                                           const std::optional<Tensor>& scale_result,
                                           std::optional<ScalarType> out_dtype,
                                           bool use_fast_accum);
std::vector<Tensor> aten_scaled_grouped_mm_v2(
    const Tensor& self, const Tensor& mat2, const std::vector<Tensor>& scales_a,
    const std::vector<int64_t>& recipes_a, const std::vector<int64_t>& swizzles_a,
    const std::vector<Tensor>& scales_b, const std::vector<int64_t>& recipes_b,
    const std::vector<int64_t>& swizzles_b, const std::optional<Tensor>& offs,
    const std::optional<Tensor>& bias, std::optional<ScalarType> out_dtype,
    const std::vector<int64_t>& contraction_dim, bool use_fast_accum);

}  // namespace torch_cubin
