// The CPU kernels: ATen through the dispatcher. References for development and tests, no more.
// What our own checks refuse never gets to ATen: errors are alike on every device.

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "cubin/error.h"
#include "ops/common/aten.h"
#include "ops/common/batch_invariant.h"
#include "ops/matmul/checks.h"
#include "ops/matmul/elementwise.h"
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

using Sizes = std::vector<int64_t>;

Tensor with_sizes(const Tensor& tensor, const Sizes& sizes, const char* op) {
  StableIValue stack[] = {from(tensor), from(sizes)};
  return call_aten(op, stack);
}

Tensor contiguous_copy(const Tensor& tensor, const Sizes& sizes) {
  Tensor copy = torch::stable::new_empty(tensor, sizes);
  torch::stable::copy_(copy, tensor);
  return copy;
}

// Fills the rows of `out` with multiply(row of `a`, [1, k]), one by one: the libraries that ATen calls
// choose their ways by the number of rows and by where they lie, so each row lies in fresh memory.
template <class Multiply>
void multiply_rows(Tensor a, Tensor& out, Multiply&& multiply) {
  for (int64_t i = 0; i < a.size(0); ++i) {
    const Tensor row = contiguous_copy(torch::stable::narrow(a, 0, i, 1), {1, a.size(1)});
    Tensor to = torch::stable::narrow(out, 0, i, 1);
    torch::stable::copy_(to, multiply(row));
  }
}

Tensor aten_matmul(const Tensor& self, const Tensor& other) {
  StableIValue stack[] = {from(self), from(other)};
  return call_aten("aten::matmul", stack);
}

// torch.matmul row by row, of which `shape` is the result's.
Tensor matmul_by_rows(const Tensor& self, const Tensor& other, const Shape& shape) {
  const TensorView a(self), b(other);
  const int64_t k = a.sizes[a.dim - 1];
  const int64_t m = a.dim > 1 ? a.sizes[a.dim - 2] : 1, n = b.dim > 1 ? b.sizes[b.dim - 1] : 1;
  Sizes a_sizes(shape.sizes, shape.sizes + shape.dim - (a.dim > 1) - (b.dim > 1));
  Sizes b_sizes = a_sizes;
  int64_t batch = 1;
  for (const int64_t size : a_sizes) batch *= size;
  for (const int64_t size : {m, k}) a_sizes.push_back(size);
  for (const int64_t size : {k, n}) b_sizes.push_back(size);
  const Tensor matrix = b.dim > 1 ? other : torch::stable::unsqueeze(other, -1);
  const Tensor rows =
      with_sizes(with_sizes(self, a_sizes, "aten::broadcast_to"), {batch, m, k}, "aten::reshape");
  const Tensor matrices =
      with_sizes(with_sizes(matrix, b_sizes, "aten::broadcast_to"), {batch, k, n}, "aten::reshape");
  Tensor out = torch::stable::new_empty(self, Sizes{batch, m, n});
  for (int64_t i = 0; i < batch; ++i) {
    Tensor products = torch::stable::select(out, 0, i);
    // A copy: whether reshape made one depends on the batch.
    const Tensor factor = contiguous_copy(torch::stable::select(matrices, 0, i), {k, n});
    multiply_rows(torch::stable::select(rows, 0, i), products,
                  [&](const Tensor& row) { return aten_matmul(row, factor); });
  }
  return with_sizes(out, Sizes(shape.sizes, shape.sizes + shape.dim), "aten::reshape");
}

Tensor aten_linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  StableIValue stack[] = {from(input), from(weight),
                          bias ? from(std::optional<Tensor>(*bias)) : from(std::nullopt)};
  return call_aten("aten::linear", stack);
}

// F.linear row by row, of which `shape` is the result's; `weight` is a matrix.
Tensor linear_by_rows(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                      const Shape& shape) {
  const int64_t k = weight.size(1), n = weight.size(0);
  const int64_t rows = shape.numel() / n;
  Tensor out = torch::stable::new_empty(input, Sizes{rows, n});
  multiply_rows(with_sizes(input, {rows, k}, "aten::reshape"), out,
                [&](const Tensor& row) { return aten_linear(row, weight, bias); });
  return with_sizes(out, Sizes(shape.sizes, shape.sizes + shape.dim), "aten::reshape");
}

Tensor to_dtype(const Tensor& tensor, ScalarType dtype) { return torch::stable::to(tensor, dtype); }

// What an epilogue is computed in, so that results are rounded once.
Tensor wide(const Tensor& tensor) {
  const bool is_16_bit = element_size(TensorView(tensor).dtype) == 2;
  return is_16_bit ? to_dtype(detach(tensor), ScalarType::Float) : detach(tensor);
}

Tensor narrow_to(const Tensor& tensor, ScalarType dtype) {
  return TensorView(tensor).dtype == dtype ? tensor : to_dtype(tensor, dtype);
}

}  // namespace

Tensor matmul_cpu(const Tensor& self, const Tensor& other) {
  const Shape shape = check_matmul(TensorView(self), TensorView(other));
  const Tensor a = detach(self), b = detach(other);
  const bool by_rows = batch_invariant() && shape.numel() > 0;
  return with_contiguous_strides(by_rows ? matmul_by_rows(a, b, shape) : aten_matmul(a, b), shape);
}

Tensor linear_cpu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const std::optional<TensorView> bias_view =
      bias ? std::optional<TensorView>(TensorView(*bias)) : std::nullopt;
  const Shape shape =
      check_linear(TensorView(input), TensorView(weight), bias_view ? &*bias_view : nullptr);
  const bool by_rows = batch_invariant() && shape.numel() > 0;
  // ATen takes a vector as weight, but no bias with it: then the vector is a matrix of one row.
  const bool as_row = TensorView(weight).dim == 1 && (bias || by_rows);
  Tensor matrix = detach(weight);
  if (as_row) matrix = torch::stable::unsqueeze(matrix, 0);
  const Tensor a = detach(input);
  const std::optional<Tensor> addend = bias ? std::optional<Tensor>(detach(*bias)) : std::nullopt;
  if (by_rows) return with_contiguous_strides(linear_by_rows(a, matrix, addend, shape), shape);
  const Tensor result = aten_linear(a, matrix, addend);
  return with_contiguous_strides(as_row ? torch::stable::squeeze(result, -1) : result, shape);
}

Tensor linear_activation_cpu(const Tensor& input, const Tensor& weight,
                             const std::optional<Tensor>& bias, std::string activation) {
  const std::optional<TensorView> bias_view =
      bias ? std::optional<TensorView>(TensorView(*bias)) : std::nullopt;
  check_linear(TensorView(input), TensorView(weight), bias_view ? &*bias_view : nullptr);
  const Activation wanted = check_activation(activation);
  std::optional<Tensor> wide_bias;
  if (bias) wide_bias = wide(*bias);
  const Tensor sums = linear_cpu(wide(input), wide(weight), wide_bias);
  return narrow_to(apply_activation(sums, wanted), TensorView(input).dtype);
}

Tensor addmm_cpu(const Tensor& input, const Tensor& mat1, const Tensor& mat2, double beta,
                 double alpha) {
  const TensorView a(mat1);
  const Shape shape = check_addmm(TensorView(input), a, TensorView(mat2));
  Tensor sums;
  if (alpha == 0) {
    sums = wide(torch::stable::new_empty(mat1, Sizes(shape.sizes, shape.sizes + shape.dim)));
    torch::stable::zero_(sums);
  } else {
    sums = scaled(matmul_cpu(wide(mat1), wide(mat2)), alpha);
  }
  const Tensor out = narrow_to(scaled_addend(sums, wide(input), beta), a.dtype);
  return with_contiguous_strides(out, shape);
}

}  // namespace torch_cubin
