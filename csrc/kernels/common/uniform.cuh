// Values in uniform registers, which hold one value for all lanes of a warp.
#pragma once

#include "ptx.cuh"

namespace torch_cubin {

// x, which is the same in all 32 lanes, in a uniform register: values that the compiler cannot
// prove uniform, and all that depend on them, take registers of every thread.
TC_DEVICE int uniform(int x) { return __reduce_max_sync(~0u, x); }

}  // namespace torch_cubin
