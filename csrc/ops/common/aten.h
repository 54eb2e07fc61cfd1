// What the CPU references share: ATen's ops, without their derivatives.
//
// NOTE: ATen's ops bring derivatives of their own, backward and forward, which would hide a missing
// formula of ours; so the references give them detached inputs.
#pragma once

#include <torch/csrc/stable/library.h>

#include "pytorch/tensor.h"

namespace torch_cubin {

// Runs an ATen op on `stack` (its arguments, at least one) and returns its only result.
Tensor call_aten_boxed(const char* op, StableIValue* stack);

// The same with its arguments as C++ has them.
template <class... Args>
Tensor call_aten(const char* op, const Args&... args) {
  StableIValue stack[] = {torch::stable::detail::from(args)...};
  return call_aten_boxed(op, stack);
}

// Without a backward graph and without a tangent.
Tensor detach(const Tensor& tensor);

}  // namespace torch_cubin
