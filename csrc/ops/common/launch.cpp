#include "ops/common/launch.h"

#include <torch/csrc/stable/ops.h>

namespace torch_cubin {

void Workspace::fill_with_zeros(Tensor& tensor) { torch::stable::zero_(tensor); }

}  // namespace torch_cubin
