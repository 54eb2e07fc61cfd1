// The public ops of attention: boxed kernels that forward to the raw op or to the one with a
// derivative.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>

namespace torch_cubin {

void scaled_dot_product_attention_composite(StableIValue* stack, uint64_t num_inputs,
                                            uint64_t num_outputs);
void attention_forward_composite(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
void attention_backward_composite(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);

// call_op() of cubin::_attention_forward or its twin with a derivative for another public op, the
// `caller`: errors name that one.
void call_attention_forward(const char* op, const char* caller, StableIValue* stack);

}  // namespace torch_cubin
