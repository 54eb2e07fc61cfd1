// What the driver says of a kernel on one device: attributes, and how many blocks run at a time.
#pragma once

#include <cstdint>

#include "runtime/kernel.h"
#include "runtime/launch_call.h"

namespace torch_cubin {

struct KernelAttributes {
  int max_threads = 0;  // a block
  int registers = 0;
  int static_shared = 0;
  int max_dynamic_shared = 0;  // the most that a launch may ask for
  int local_bytes = 0;         // a thread
  int constant_bytes = 0;
  int binary_version = 0;  // 90 for sm_90
  int ptx_version = 0;
};

// Loads the kernel there. Throws [arch] where it cannot run.
KernelAttributes attributes_of(Kernel& kernel, const Device& device);

// Blocks of the call's block and shared memory that a multiprocessor runs at a time; with
// TORCH_CUBIN_CLUSTER, or a cluster of the binary's own, clusters that the device does. Throws
// [launch] for more shared memory than a block may have.
int64_t occupancy_of(Kernel& kernel, const torch_cubin_launch_call& call, const Device& device);

}  // namespace torch_cubin
