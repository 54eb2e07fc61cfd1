// Memory that the driver needs for code, globals and local memory, beside a caching allocator that
// keeps what tensors have freed.
#pragma once

#include "driver/driver.h"

namespace torch_cubin {

// Gives what a caching allocator keeps of a device's free memory back to the driver.
using ReleaseCache = void (*)(int device_index);

// Null, as at first, where there is no such allocator.
void set_release_cache(ReleaseCache release);

// Whether there is one; then it was asked to.
bool release_cached_memory(int device_index);

// `call`, and once more after the cache was emptied if the driver has no memory for it.
template <class Call>
CUresult with_device_memory(int device_index, const Call& call) {
  const CUresult result = call();
  if (result != CUDA_ERROR_OUT_OF_MEMORY || !release_cached_memory(device_index)) return result;
  return call();
}

}  // namespace torch_cubin
