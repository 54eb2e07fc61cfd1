// Calls of other ops through PyTorch's dispatcher. The public ops (csrc/ops_<family>.cpp, and for
// those that do a little more ops/<family>/composite.cpp) do that and nothing else.
//
// NOTE: reading a size there would make torch.compile build one graph a size, and calling a kernel
// directly would hand it tensors without data. So the boxed arguments pass through untouched,
// which also saves the wrapping of every tensor: the callee takes the stack over as it came.
//
// Who owns the arguments: a boxed kernel does, from its first line on, and PyTorch gives nothing back
// where it throws. So each of them either hands the whole stack to call_op, which takes it over
// whether the call succeeds or not, or gives back what it holds before it throws. TORCH_BOX does the
// latter for kernels with ordinary arguments, BoxedArguments for declared ops
// (declared/boxed_arguments.h).
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <initializer_list>

#include "pytorch/tensor.h"

namespace torch_cubin {

// Whether what runs now may be differentiated: gradients are on, or a forward-AD level is open.
bool differentiable();

// Calls the op on the boxed arguments in `stack`, which it takes over, and leaves its results
// there. What it throws is thrown again, with its text on every version of PyTorch.
void call_op(const char* op, const char* overload, StableIValue* stack);

// call_op() with arguments as C++ has them, of an op that returns one tensor.
template <class... Args>
Tensor call_tensor_op(const char* op, const char* overload, const Args&... args) {
  StableIValue stack[] = {torch::stable::detail::from(args)...};
  call_op(op, overload, stack);
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// call_op() of the raw op, or of the one with a derivative where what runs may be differentiated.
void call_by_grad_mode(const char* raw, const char* autograd, StableIValue* stack);

// The name of the first of these arguments, with which `stack` begins, that is an undefined tensor;
// null where none is. PyTorch makes one of Python's None, whatever the schema says.
const char* find_undefined(std::initializer_list<const char*> tensors, const StableIValue* stack);

[[noreturn]] void fail_undefined(const char* op, const char* argument);

// Runs `call`, the body of a public op, which takes `stack` over. Where one of the tensors with which
// it begins is undefined the call fails, somewhere, and this says why instead.
template <class Call>
void call_with_tensors(const char* op, std::initializer_list<const char*> tensors,
                       StableIValue* stack, const Call& call) {
  const char* undefined = find_undefined(tensors, stack);
  if (undefined == nullptr) return call();
  try {
    call();  // which gives the arguments back
  } catch (...) {
  }
  fail_undefined(op, undefined);
}

// A new number from the device's generator, so that torch.manual_seed decides it, a CUDA graph
// draws another at each replay, and checkpointing draws the same again. `like` is only asked for
// its device.
Tensor draw_seed(AtenTensorHandle like);

}  // namespace torch_cubin
