// The one launch, of users' kernels and of the library's own: plain addresses, a stream, and a shape
// that is checked against the binary and the device before the driver is asked.
#pragma once

#include "runtime/launch_call.h"
#include "runtime/module.h"

namespace torch_cubin {

// Launches on the call's device, and on its stream where it names one or `current_stream` is null, else
// on what `current_stream` says. The grid must be a whole number of clusters: it is never rounded here,
// since only a kernel whose blocks past the last tile return may get more blocks than there are
// tiles. Throws [launch] for a shape that the kernel or the device cannot have, [closed], [arch] and
// what the driver says.
void launch(Kernel& kernel, const torch_cubin_launch_call& call, CurrentStream current_stream);

// Kernels launched by this process so far.
int64_t launch_count();

}  // namespace torch_cubin
