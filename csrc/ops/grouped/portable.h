// The kernels of csrc/kernels/matmul/groups_simt.cu and groups_mma.cu: products of groups of
// float32, by TF32 where PyTorch's settings allow it, and of float64.
#pragma once

#include "ops/grouped/call.h"

namespace torch_cubin {

// Throws [no_kernel] or [arch] where the device has no such kernel.
void run_portable_grouped(const Device& device, const GroupedCall& call);

}  // namespace torch_cubin
