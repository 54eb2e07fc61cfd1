// The single launch function, for users' kernels and the library's own. Checks the shape against
// the binary and the device before calling the driver.
#pragma once

#include "runtime/launch_call.h"
#include "runtime/module.h"

namespace torch_cubin {

// Launches on the call's device. The stream is the call's if it names one or `current_stream` is
// null, else the result of `current_stream`. The grid must be a whole number of clusters; it is not
// rounded, since only a kernel whose blocks past the last tile return can run extra blocks. Throws
// [launch] for a shape that the kernel or the device does not support, [closed], [arch], and the
// driver's errors.
void launch(Kernel& kernel, const torch_cubin_launch_call& call, CurrentStream current_stream);

// Kernels launched by this process so far.
int64_t launch_count();

}  // namespace torch_cubin
