// Where the helpers of these kernels were before csrc/kernels/common/hopper.cuh had them.
#pragma once

#include "../../csrc/kernels/common/hopper.cuh"

namespace torch_cubin {
namespace sm90 {
TC_DEVICE u32 address_of_shared(const void* pointer) { return shared_address(pointer); }
}  // namespace sm90
}  // namespace torch_cubin
