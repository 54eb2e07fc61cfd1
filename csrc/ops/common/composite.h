// The public ops: boxed kernels that forward to the raw op or to the one with a derivative.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>

namespace torch_cubin {

void matmul_composite(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
void linear_composite(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
void scaled_dot_product_attention_composite(StableIValue* stack, uint64_t num_inputs,
                                            uint64_t num_outputs);
void attention_forward_composite(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
void attention_backward_composite(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);

}  // namespace torch_cubin
