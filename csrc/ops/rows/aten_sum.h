// Our kernel of aten::sum.dim_IntList, for install() and drop_in(): sums over the rows of a matrix,
// which are the gradients of biases. ops/common/serving.h says which calls are served.
#pragma once

#include <optional>
#include <vector>

#include "pytorch/tensor.h"

namespace torch_cubin {

Tensor aten_sum_dims(const Tensor& self, std::optional<std::vector<int64_t>> dims, bool keepdim,
                     std::optional<ScalarType> dtype);

}  // namespace torch_cubin
