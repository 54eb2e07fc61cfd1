// PyTorch's current CUDA stream.
#pragma once

#include "runtime/module.h"

namespace torch_cubin {

// On that device. Throws [driver] where this PyTorch has no CUDA streams.
CUstream current_stream(int device_index);

// That function, or null where this PyTorch has no CUDA streams.
CurrentStream current_stream_if_any();

}  // namespace torch_cubin
