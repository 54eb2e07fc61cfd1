// The launch of a user's kernel: everything that can be told from the binary and the device is
// checked before the driver is asked.
#pragma once

#include "runtime/launch_call.h"
#include "runtime/user_module.h"

namespace torch_cubin {

// Launches on the call's device, and on its stream or PyTorch's current one. Throws [launch] for a
// shape that the kernel or the device cannot have, [closed], [arch] and what the driver says.
void launch(UserKernel& kernel, const torch_cubin_launch_call& call);

}  // namespace torch_cubin
