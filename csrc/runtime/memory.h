// Device memory for programs that use nothing else of CUDA: allocate, copy, wait.
#pragma once

#include <cstdint>

#include "runtime/device.h"

namespace torch_cubin {

// Throws [oom] where the device has no such room.
void* allocate_memory(const Device& device, uint64_t bytes);

// Waits for the device's work, as the driver does.
void free_memory(const Device& device, void* memory);

// In the stream's order; either side may be the host's or a device's.
void copy_memory(const Device& device, void* to, const void* from, uint64_t bytes, void* stream);

void synchronize_stream(const Device& device, void* stream);

}  // namespace torch_cubin
