// Launches of Hopper's kernels whose last tiles may be streamed: several clusters have parts of a
// tile's K, and the one with the last part adds up the others
// (csrc/kernels/matmul/sm90_split.cuh).
#pragma once

#include <cstdint>

#include "kernels/matmul/sm90_params.h"
#include "package/package_kernel.h"
#include "runtime/device.h"

namespace torch_cubin {

// A finisher waits for the other parts for a millisecond at most, which is longer than any takes.
constexpr int32_t kStreamPolls = 10000;

// What a block of a kernel has.
struct Sm90Block {
  int64_t tile_m, tile_n, warpgroups;  // that multiply
};

// Launches the kernel with the scratch memory that its streamed tiles take.
void launch_sm90(PackageKernel& kernel, const Grid& grid, const Sm90Block& block,
                 const Device& device, Sm90MatmulParams& params);

}  // namespace torch_cubin
