// PyTorch's current CUDA stream.
#pragma once

#include "runtime/module.h"

namespace torch_cubin {

// The current stream of the device, which lasts if PyTorch made it. Throws [driver] if this PyTorch
// is a CPU build.
LaunchStream current_stream(int device_index);

// The getter itself; null if this PyTorch is a CPU build.
CurrentStream current_stream_if_any();

}  // namespace torch_cubin
