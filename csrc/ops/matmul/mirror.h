// mirror_lower: the lower triangle of square matrices, copied to the upper one.
#pragma once

#include <cstdint>

#include "ops/matmul/cost.h"
#include "runtime/device.h"

namespace torch_cubin {

// `batch` contiguous n x n matrices, one after the other, on the device's current stream.
void mirror_lower(char* data, int64_t n, int64_t batch, int64_t element_bytes,
                  const Device& device);

// What that asks of the device.
Work mirror_work(int64_t n, int64_t batch, int64_t element_bytes, const Device& device);

}  // namespace torch_cubin
