// Device memory for programs without the CUDA runtime: allocate, free, copy.
#pragma once

#include <cstdint>

#include "runtime/device.h"

namespace torch_cubin {

// Throws [oom] if the device is out of memory.
void* allocate_memory(const Device& device, uint64_t bytes);

// Waits for the device's work, as cuMemFree does.
void free_memory(const Device& device, void* memory);

// In stream order. Both addresses may be host or device memory.
void copy_memory(const Device& device, void* to, const void* from, uint64_t bytes, void* stream);

void synchronize_stream(const Device& device, void* stream);

}  // namespace torch_cubin
