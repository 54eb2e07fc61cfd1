// The public ops matmul, linear and addmm: boxed kernels that forward to the raw op or to the one with a
// derivative.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>

namespace torch_cubin {

void matmul_composite(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
void linear_composite(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
void addmm_composite(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);

}  // namespace torch_cubin
