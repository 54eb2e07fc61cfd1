// Calls of other ops through PyTorch's dispatcher, for the ops that are composed of some.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>

#include "pytorch/tensor.h"

namespace torch_cubin {

// Whether what runs now may be differentiated: gradients are on, or a forward-AD level is open.
bool differentiable();

// Calls the op on the boxed arguments in `stack`, which it takes over, and leaves its results
// there. What it throws is thrown again, with its text on every version of PyTorch.
void call_op(const char* op, const char* overload, StableIValue* stack);

// call_op() of cubin::_attention_forward or its twin with a derivative for another public op, the
// `caller`: errors name that one.
void call_attention_forward(const char* op, const char* caller, StableIValue* stack);

// A new number from the device's generator, so that torch.manual_seed decides it, a CUDA graph
// draws another at each replay, and checkpointing draws the same again. `like` is only asked for
// its device.
Tensor draw_seed(AtenTensorHandle like);

}  // namespace torch_cubin
