// Our kernel of aten::_grouped_mm, for install() and drop_in(); ops/common/serving.h says which
// calls are served.
#pragma once

#include <optional>
#include <vector>

#include "pytorch/tensor.h"

namespace torch_cubin {

// The product, or nothing for a call that is not served. Python registers the kernel, which passes
// those to PyTorch's own (_drop_in/aten_kernels.py), because PyTorch 2.11 has no C shim for it.
std::vector<Tensor> aten_grouped_mm(const Tensor& self, const Tensor& mat2,
                                    const std::optional<Tensor>& offs,
                                    const std::optional<Tensor>& bias,
                                    std::optional<ScalarType> out_dtype);

}  // namespace torch_cubin
