#include "ops/common/launch.h"

#include "ops/common/stable_ops.h"

namespace torch_cubin {

void Workspace::fill_with_zeros(Tensor& tensor) { torch::stable::zero_(tensor); }

}  // namespace torch_cubin
