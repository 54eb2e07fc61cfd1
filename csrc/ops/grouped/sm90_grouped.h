// The kernels of csrc/kernels/matmul/sm90_grouped.cu: products of groups of 16-bit types.
#pragma once

#include "ops/grouped/call.h"

namespace torch_cubin {

// Throws [no_kernel] or [arch] where the device has no such kernel.
void run_sm90_grouped(const Device& device, const GroupedCall& call);

}  // namespace torch_cubin
