// ATen's ops without their derivatives, for the CPU references.
//
// NOTE: ATen's ops have derivatives of their own, which would hide a missing formula of ours. So
// the references pass detached inputs.
#pragma once

#include <torch/csrc/stable/library.h>

#include "pytorch/tensor.h"

namespace torch_cubin {

// Runs an ATen op on the arguments in `stack` (at least one) and returns its only result.
Tensor call_aten_boxed(const char* op, const char* overload, StableIValue* stack);

// The same with typed arguments.
template <class... Args>
Tensor call_aten(const char* op, const Args&... args) {
  StableIValue stack[] = {torch::stable::detail::from(args)...};
  return call_aten_boxed(op, "", stack);
}

template <class... Args>
Tensor call_aten_overload(const char* op, const char* overload, const Args&... args) {
  StableIValue stack[] = {torch::stable::detail::from(args)...};
  return call_aten_boxed(op, overload, stack);
}

// aten::allclose, where NaN equals NaN; waits for the tensors' values.
bool aten_allclose(const Tensor& a, const Tensor& b, double atol);

// Without a backward graph and without a tangent.
Tensor detach(const Tensor& tensor);

// The tensor itself, or a contiguous copy.
Tensor as_contiguous(const Tensor& tensor);

}  // namespace torch_cubin
