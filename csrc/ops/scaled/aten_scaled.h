// Our kernel of aten::_scaled_mm, for install() and drop_in(); ops/common/serving.h says which
// calls are served.
#pragma once

#include <optional>

#include "pytorch/tensor.h"

namespace torch_cubin {

constexpr int kScaledSm = 90;            // of the GPUs that have kernels
constexpr int64_t kScaledMultiple = 16;  // PyTorch's product takes no other sizes of K and N

Tensor aten_scaled_mm(const Tensor& self, const Tensor& mat2, const Tensor& scale_a,
                      const Tensor& scale_b, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& scale_result,
                      std::optional<ScalarType> out_dtype, bool use_fast_accum);

}  // namespace torch_cubin
