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

// For the Python kernels and fakes below a public op: keeps the text of the error that they are
// about to raise, which the C API would lose on the way up (torch_cubin/_ops/checks.py calls it).
extern "C" void torch_cubin_keep_error(const char* message);
