// Tensor maps: what the hardware's tensor memory accelerator (TMA) reads of a tensor, encoded by the
// driver on the host into 128 bytes that a kernel takes by value.
#pragma once

#include <cstdint>

#include "runtime/launch_call.h"

namespace torch_cubin {

constexpr int kTensorMapBytes = 128;

// Encodes `map` into `out`, at any alignment. Throws [driver] where the driver refuses.
void encode_tensor_map(const torch_cubin_tensor_map& map, uint8_t* out);

}  // namespace torch_cubin
