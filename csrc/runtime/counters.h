// Counters in device memory that are zero before a kernel and that the kernel leaves zero, so that
// no launch sets them. One that did took up to 2 us of each product (1024 x 1024 x 11992 back to
// back on an H200: 0.88 of cuBLAS's speed with it, 0.92 without).
#pragma once

#include <cstdint>

#include "runtime/device.h"

namespace torch_cubin {

// The counters of the next launch on `stream`, at most 2,048 bytes. A stream has the same ones for
// all of its launches, which follow one another. A captured launch has its own, because branches of
// a graph run at once; the graph holds them, and so does all that is instantiated from it.
//
// Null if there are none, or if the driver refuses: a device has 16,384 (32 MiB), of which streams
// take 1,024 at most. The caller then sets memory of its own to zero.
int* counters_of_launch(const Device& device, CUstream stream, int64_t bytes);

}  // namespace torch_cubin
