// Calls of other ops through PyTorch's dispatcher. The public ops (csrc/ops_<family>.cpp and
// ops/<family>/composite.cpp) only forward.
//
// NOTE: if a public op read a size, torch.compile would build one graph for each size; if it called
// a kernel directly, the kernel would get tensors without data. So the boxed arguments pass through
// untouched, which also saves wrapping each tensor.
//
// Ownership: a boxed kernel owns its arguments from its first line on, and PyTorch releases nothing
// if it throws. So a kernel either passes the whole stack to call_op, which always consumes it, or
// releases what it holds before it throws. TORCH_BOX does this for kernels with typed arguments,
// BoxedArguments for declared ops (declared/boxed_arguments.h).
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <initializer_list>

#include "pytorch/tensor.h"
#include "pytorch/text_argument.h"

namespace torch_cubin {

// Whether calls may be differentiated now: grad mode is on, or a forward-AD level is open.
bool differentiable();

// Calls the op, consumes the boxed arguments in `stack` and leaves the results there. Rethrows the
// op's error with its text, on every version of PyTorch.
void call_op(const char* op, const char* overload, StableIValue* stack);

// call_op() with typed arguments, for an op that returns one tensor.
template <class... Args>
Tensor call_tensor_op(const char* op, const char* overload, const Args&... args) {
  StableIValue stack[] = {torch::stable::detail::from(args)...};
  call_op(op, overload, stack);
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// How many arguments an op begins with that are tensors, and how many optional tensors follow them.
struct LeadingTensors {
  int required, optional;
};

// The same for a call of which these are all tensors: none of them requires grad, and no transform
// of torch.func runs, which may wrap one that does.
bool differentiable(const StableIValue* stack, LeadingTensors tensors);

// call_op() of the raw op, or of its autograd variant if differentiable(). That begins in Python,
// which a call that says what its tensors are is spared where none requires grad.
void call_by_grad_mode(const char* raw, const char* autograd, StableIValue* stack);
void call_by_grad_mode(const char* raw, const char* autograd, StableIValue* stack,
                       LeadingTensors tensors);

// `tensors` names the leading arguments in `stack`. Returns the name of the first that is an
// undefined tensor, or null. PyTorch converts Python's None to one, regardless of the schema.
const char* find_undefined(std::initializer_list<const char*> tensors, const StableIValue* stack);

[[noreturn]] void fail_undefined(const char* op, const char* argument);

// Runs `call`, the body of a public op, which consumes `stack`. If the call fails and one of its
// leading tensors is undefined, throws the error that says so.
template <class Call>
void call_with_tensors(const char* op, std::initializer_list<const char*> tensors,
                       StableIValue* stack, const Call& call) {
  const char* undefined = find_undefined(tensors, stack);
  if (undefined == nullptr) return call();
  try {
    call();  // releases the arguments
  } catch (...) {
  }
  fail_undefined(op, undefined);
}

// Draws a number from the generator of like's device: torch.manual_seed determines it, a CUDA graph
// draws a new one at each replay, and checkpointing draws the same one again.
Tensor draw_seed(AtenTensorHandle like);

}  // namespace torch_cubin
