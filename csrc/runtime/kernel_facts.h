// The driver's facts about a kernel on one device: attributes and occupancy.
#pragma once

#include <cstdint>

#include "runtime/kernel.h"
#include "runtime/launch_call.h"

namespace torch_cubin {

struct KernelAttributes {
  int max_threads = 0;  // per block
  int registers = 0;
  int static_shared = 0;
  int max_dynamic_shared = 0;  // maximal dynamic bytes of a launch
  int local_bytes = 0;         // per thread
  int constant_bytes = 0;
  int binary_version = 0;  // 90 for sm_90
  int ptx_version = 0;
};

// Loads the kernel on the device. Throws [arch] if it cannot run there.
KernelAttributes attributes_of(Kernel& kernel, const Device& device);

// The maximal resident blocks per multiprocessor for the call's block and shared memory. With
// TORCH_CUBIN_CLUSTER or a compiled cluster, the maximal resident clusters per device. Throws
// [launch] for more shared memory than a block may have.
int64_t occupancy_of(Kernel& kernel, const torch_cubin_launch_call& call, const Device& device);

}  // namespace torch_cubin
