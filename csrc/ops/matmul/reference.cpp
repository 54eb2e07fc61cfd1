// The CPU kernels: ATen through the dispatcher. References for development and tests, no more.
// What our own checks refuse never gets to ATen: errors are alike on every device.

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "cubin/error.h"
#include "ops/common/aten.h"
#include "ops/matmul/checks.h"
#include "ops/matmul/matmul.h"
#include "pytorch/contiguous.h"
#include "pytorch/torch_error.h"

namespace torch_cubin {

using torch::stable::detail::from;
using torch::stable::detail::to;

namespace {

// `result` with the strides of a contiguous tensor in every dimension. ATen leaves others where a
// size is 1, and the fake kernels promise these.
Tensor with_contiguous_strides(const Tensor& result, const Shape& shape) {
  const TensorView view(result);
  int64_t strides[kMaxDims];
  contiguous_strides(shape.sizes, shape.dim, strides);
  if (std::equal(strides, strides + shape.dim, view.strides)) {
    // NOTE: for some ranks ATen's result is a view, and autograd refuses to let a view that a custom
    // Function returns be changed in place. Ours is fresh on every device.
    StableIValue stack[] = {from(result),
                            from(std::vector<int64_t>(shape.sizes, shape.sizes + shape.dim))};
    return call_aten("aten::_unsafe_view", stack);
  }
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(shape.dim, shape.sizes, strides, static_cast<int32_t>(view.dtype),
                               view.device_type, view.device_index,
                               &handle) != AOTI_TORCH_SUCCESS) {
    fail({"oom", "the CPU reference's output", "could not be allocated",
          std::to_string(shape.numel()) + " elements", "an error", "Free memory."});
  }
  Tensor out(handle);
  torch::stable::copy_(out, result);
  return out;
}

}  // namespace

Tensor matmul_cpu(const Tensor& self, const Tensor& other) {
  const Shape shape = check_matmul(TensorView(self), TensorView(other));
  StableIValue stack[] = {from(detach(self)), from(detach(other))};
  return with_contiguous_strides(call_aten("aten::matmul", stack), shape);
}

Tensor linear_cpu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const std::optional<TensorView> bias_view =
      bias ? std::optional<TensorView>(TensorView(*bias)) : std::nullopt;
  const Shape shape =
      check_linear(TensorView(input), TensorView(weight), bias_view ? &*bias_view : nullptr);
  // ATen takes a vector as weight, but no bias with it: then the vector is a matrix of one row.
  const bool as_row = bias && TensorView(weight).dim == 1;
  Tensor matrix = detach(weight);
  if (as_row) matrix = torch::stable::unsqueeze(matrix, 0);
  StableIValue stack[] = {from(detach(input)), from(matrix),
                          bias ? from(std::optional<Tensor>(detach(*bias))) : from(std::nullopt)};
  const Tensor result = call_aten("aten::linear", stack);
  return with_contiguous_strides(as_row ? torch::stable::squeeze(result, -1) : result, shape);
}

}  // namespace torch_cubin
