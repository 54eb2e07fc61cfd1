// Retries driver calls that need device memory (for code, globals, local memory) after emptying the
// caching allocator.
#pragma once

#include "driver/driver.h"

namespace torch_cubin {

// Releases a caching allocator's unused memory on a device to the driver.
using ReleaseCache = void (*)(int device_index);

// Null, the default, if there is no such allocator.
void set_release_cache(ReleaseCache release);

// Returns whether there is a caching allocator; if so, it was asked to release its memory.
bool release_cached_memory(int device_index);

// Runs `call`; if the driver is out of memory, empties the cache and runs it once more.
template <class Call>
CUresult with_device_memory(int device_index, const Call& call) {
  const CUresult result = call();
  if (result != CUDA_ERROR_OUT_OF_MEMORY || !release_cached_memory(device_index)) return result;
  return call();
}

}  // namespace torch_cubin
