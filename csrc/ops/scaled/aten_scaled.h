// Our kernels of aten::_scaled_mm and _scaled_mm_v2 (F.scaled_mm), for install() and drop_in();
// ops/common/serving.h says which calls are served.
#pragma once

#include <optional>
#include <vector>

#include "pytorch/tensor.h"

namespace torch_cubin {

constexpr int kScaledSm = 90;            // of the GPUs that have kernels
constexpr int64_t kScaledMultiple = 16;  // PyTorch's product takes no other sizes of K and N

Tensor aten_scaled_mm(const Tensor& self, const Tensor& mat2, const Tensor& scale_a,
                      const Tensor& scale_b, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& scale_result,
                      std::optional<ScalarType> out_dtype, bool use_fast_accum);

// The arguments of aten::_scaled_mm_v2 and _scaled_grouped_mm_v2 that say what the scales are.
struct ScaleLists {
  const std::vector<Tensor>&scales_a, &scales_b;
  const std::vector<int64_t>&recipes_a, &recipes_b, &swizzles_a, &swizzles_b, &contraction_dim;
};

// Why these are left to PyTorch; null if each operand has one scale, as it is.
const char* why_not_lists(const ScaleLists& lists);

// The product, or nothing if the call is left to PyTorch.
std::vector<Tensor> aten_scaled_mm_v2(
    const Tensor& self, const Tensor& mat2, const std::vector<Tensor>& scales_a,
    const std::vector<int64_t>& recipes_a, const std::vector<int64_t>& swizzles_a,
    const std::vector<Tensor>& scales_b, const std::vector<int64_t>& recipes_b,
    const std::vector<int64_t>& swizzles_b, const std::optional<Tensor>& bias,
    std::optional<ScalarType> out_dtype, const std::vector<int64_t>& contraction_dim,
    bool use_fast_accum);

}  // namespace torch_cubin
