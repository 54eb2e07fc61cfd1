// Linear layers of one input of at most 64 rows, in one launch of the kernels of
// csrc/kernels/matmul/sm90_skinny.cu. The layers are of sm90_fused.h, which takes more rows.
#pragma once

#include "ops/matmul/sm90_fused.h"

namespace torch_cubin {

constexpr int64_t kSkinnyMostTokens = 64;

bool has_skinny_kernels(const Device& device);

// The following run nothing and return false where these kernels do not take the layers, or the
// device has none.
bool run_skinny_layers(const Device& device, const FusedLayer* layers, int count);

// activation(gate) * up to the gate's `c`, with the gate's activation.
bool run_skinny_gated(const Device& device, const FusedLayer& gate, const FusedLayer& up);

}  // namespace torch_cubin
