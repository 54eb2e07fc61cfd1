// What the kernels of norms do before the kernel before them has ended.
#pragma once

#include "common/ptx.cuh"
#include "norm_params.h"

namespace torch_cubin {

// Prefetches a parameter that all rows read after their sums, each line of the cache by one thread
// of the grid.
TC_DEVICE void prefetch_parameter(const void* parameter, int dtype, int columns) {
  const tc_int64 line = static_cast<tc_int64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const tc_int64 bytes = static_cast<tc_int64>(columns) << (dtype == kRowFloat32 ? 2 : 1);
  if (parameter == nullptr || line * 128 >= bytes) return;
  prefetch_l2(static_cast<const char*>(parameter) + line * 128);
}

TC_DEVICE void prefetch_parameters(const NormParams& p) {
  prefetch_parameter(p.weight, p.weight_dtype, p.columns);
  prefetch_parameter(p.bias, p.bias_dtype, p.columns);
}

}  // namespace torch_cubin
