// The kernels of csrc/kernels/matmul/sm90_fused.cu: one A with several weights, or with several
// outputs of one weight, in one launch. Up to 64 rows of A go to sm90_skinny.h.
#pragma once

#include <optional>

#include "kernels/matmul/sm90_fused_params.h"
#include "ops/matmul/backend.h"

namespace torch_cubin {

// A linear layer of 16-bit operands. `out` is contiguous.
struct FusedLayer {
  MatmulProblem problem;
  MatmulOperands operands;
};

// Whether the kernels take a layer at all: K-major operands that tensor maps describe, whole
// vectors of outputs, a contiguous bias. `activation` and `out` play no part.
bool takes_fused(const Device& device, const FusedLayer& layer);

// The following run nothing and return false where the device has no such kernel, or where tiles
// would leave much of it idle, so that products that split K are quicker. All layers are taken, of
// one A, and have the same M.
bool run_layers(const Device& device, const FusedLayer* layers, int count);

// The layer with its problem's activation; `aux` gets its sums before that.
bool run_activation_aux(const Device& device, const FusedLayer& layer, char* aux);

// activation(gate) * up to the gate's `c`, with the gate's activation. `gate_out` and `up_out`,
// both or none, get the layers' own results.
bool run_gated(const Device& device, const FusedLayer& gate, const FusedLayer& up, char* gate_out,
               char* up_out);

}  // namespace torch_cubin
