// The CPU kernels: ATen through the dispatcher. References for development and tests only. Our own
// checks run first, so that errors are the same on every device.

#include <algorithm>
#include <vector>

#include "ops/common/aten.h"
#include "ops/common/batch_invariant.h"
#include "ops/common/stable_ops.h"
#include "ops/matmul/checks.h"
#include "ops/matmul/elementwise.h"
#include "ops/matmul/matmul.h"
#include "pytorch/autograd_state.h"
#include "pytorch/contiguous.h"

namespace torch_cubin {

namespace {

// `result` with the strides of a contiguous tensor in every dimension. ATen chooses other strides
// for dims of size 1, and the fake kernels promise these.
Tensor with_contiguous_strides(const Tensor& result, const Shape& shape) {
  const TensorView view(result);
  int64_t strides[kMaxDims];
  contiguous_strides(shape.sizes, shape.dim, strides);
  if (std::equal(strides, strides + shape.dim, view.strides)) {
    // NOTE: for some ranks ATen's result is a view, and autograd does not allow in-place changes of
    // a view that a custom Function returns. Ours is a new tensor on every device.
    return call_aten("aten::_unsafe_view", result, shape.vector());
  }
  Tensor out = empty_near(view, shape.sizes, shape.dim, view.dtype);
  torch::stable::copy_(out, result);
  return out;
}

using Sizes = std::vector<int64_t>;

// Not torch::stable::reshape, whose failures have no tag.
Tensor aten_reshape(const Tensor& tensor, const Sizes& sizes) {
  return call_aten("aten::reshape", tensor, sizes);
}

Tensor contiguous_copy(const Tensor& tensor, const Sizes& sizes) {
  Tensor copy = torch::stable::new_empty(tensor, sizes);
  torch::stable::copy_(copy, tensor);
  return copy;
}

// Fills the rows of `out` with multiply(row of `a`, [1, k]), one by one: the libraries that ATen
// calls choose their algorithm by the number of rows and their address, so each row is in new
// memory.
template <class Multiply>
void multiply_rows(Tensor a, Tensor& out, Multiply&& multiply) {
  for (int64_t i = 0; i < a.size(0); ++i) {
    const Tensor row = contiguous_copy(torch::stable::narrow(a, 0, i, 1), {1, a.size(1)});
    Tensor to = torch::stable::narrow(out, 0, i, 1);
    torch::stable::copy_(to, multiply(row));
  }
}

Tensor aten_matmul(const Tensor& self, const Tensor& other) {
  return call_aten("aten::matmul", self, other);
}

// torch.matmul row by row; `shape` is the result's.
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
  const Tensor rows = aten_reshape(call_aten("aten::broadcast_to", self, a_sizes), {batch, m, k});
  const Tensor matrices =
      aten_reshape(call_aten("aten::broadcast_to", matrix, b_sizes), {batch, k, n});
  Tensor out = torch::stable::new_empty(self, Sizes{batch, m, n});
  for (int64_t i = 0; i < batch; ++i) {
    Tensor products = torch::stable::select(out, 0, i);
    // A copy, because whether reshape makes one depends on the batch.
    const Tensor factor = contiguous_copy(torch::stable::select(matrices, 0, i), {k, n});
    multiply_rows(torch::stable::select(rows, 0, i), products,
                  [&](const Tensor& row) { return aten_matmul(row, factor); });
  }
  return aten_reshape(out, shape.vector());
}

Tensor aten_linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  return call_aten("aten::linear", input, weight, bias);
}

// F.linear row by row; `shape` is the result's, `weight` a matrix.
Tensor linear_by_rows(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                      const Shape& shape) {
  const int64_t k = weight.size(1), n = weight.size(0);
  const int64_t rows = shape.numel() / n;
  Tensor out = torch::stable::new_empty(input, Sizes{rows, n});
  multiply_rows(aten_reshape(input, {rows, k}), out,
                [&](const Tensor& row) { return aten_linear(row, weight, bias); });
  return aten_reshape(out, shape.vector());
}

}  // namespace

Tensor matmul_cpu(const Tensor& self, const Tensor& other) {
  const Shape shape = check_matmul(TensorView(self), TensorView(other));
  const Tensor a = detach(self), b = detach(other);
  const bool by_rows = batch_invariant() && shape.numel() > 0;
  return with_contiguous_strides(by_rows ? matmul_by_rows(a, b, shape) : aten_matmul(a, b), shape);
}

Tensor linear_cpu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const Shape shape = check_linear(TensorView(input), TensorView(weight), view_of(bias));
  const bool by_rows = batch_invariant() && shape.numel() > 0;
  // ATen supports a vector as weight, but then no bias: the vector becomes a matrix of one row.
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
                             const std::optional<Tensor>& bias, const std::string& activation) {
  const Shape shape = check_linear(TensorView(input), TensorView(weight), view_of(bias));
  const Activation wanted = check_activation(activation);
  std::optional<Tensor> wide_bias;
  if (bias) wide_bias = wide(*bias);
  const Tensor sums = linear_cpu(wide(input), wide(weight), wide_bias);
  const ScalarType dtype = TensorView(input).dtype;
  if (!batch_invariant() || shape.numel() == 0) {
    return narrow_to(apply_activation(sums, wanted), dtype);
  }
  // ATen computes the last elements of a tensor by other functions, whose last bits differ.
  const int64_t columns = TensorView(weight).dim == 2 ? weight.size(0) : 1;
  const int64_t rows = shape.numel() / columns;
  Tensor out = torch::stable::new_empty(sums, Sizes{rows, columns});
  multiply_rows(aten_reshape(sums, {rows, columns}), out,
                [&](const Tensor& row) { return apply_activation(row, wanted); });
  return narrow_to(aten_reshape(out, shape.vector()), dtype);
}

Tensor addmm_dtype_cpu(const Tensor& input, const Tensor& mat1, const Tensor& mat2,
                       ScalarType out_dtype, double beta, double alpha) {
  const Shape shape = check_addmm(TensorView(input), TensorView(mat1), TensorView(mat2), out_dtype);
  Tensor sums;
  if (TensorView(mat1).sizes[mat1.dim() - 1] == 0 || alpha == 0) {  // alpha may be NaN
    sums = wide(torch::stable::new_empty(mat1, shape.vector()));
    torch::stable::zero_(sums);
  } else {
    sums = scaled(matmul_cpu(wide(mat1), wide(mat2)), alpha);
  }
  const Tensor out = narrow_to(scaled_addend(sums, wide(input), beta), out_dtype);
  return with_contiguous_strides(out, shape);
}

Tensor addmm_cpu(const Tensor& input, const Tensor& mat1, const Tensor& mat2, double beta,
                 double alpha) {
  return addmm_dtype_cpu(input, mat1, mat2, TensorView(mat1).dtype, beta, alpha);
}

void addmm_into_cpu(const Tensor& out, const Tensor& mat1, const Tensor& mat2, double beta,
                    double alpha) {
  const TensorView c(out);
  check_addmm_into(c, TensorView(mat1), TensorView(mat2));
  const Tensor result = addmm_dtype_cpu(out, mat1, mat2, c.dtype, beta, alpha);
  bump_version(out.get());
  Tensor to = detach(out);
  torch::stable::copy_(to, result);
}

void matmul_out_cpu(const Tensor& self, const Tensor& other, const Tensor& out) {
  Tensor to = out;
  torch::stable::copy_(to, matmul_cpu(self, other));
}

void linear_activation_out_cpu(const Tensor& input, const Tensor& weight,
                               const std::optional<Tensor>& bias, const std::string& activation,
                               const Tensor& out) {
  Tensor to = out;
  const bool plain = check_activation(activation) == kActivationNone;
  torch::stable::copy_(to, plain ? linear_cpu(input, weight, bias)
                                 : linear_activation_cpu(input, weight, bias, activation));
}

void addmm_out_cpu(const Tensor& input, const Tensor& mat1, const Tensor& mat2, double beta,
                   double alpha, const Tensor& out) {
  Tensor to = out;
  torch::stable::copy_(to, addmm_cpu(input, mat1, mat2, beta, alpha));
}

std::tuple<Tensor, Tensor> weight_and_bias_gradient_cpu(const Tensor& grad, const Tensor& input) {
  check_weight_gradient(TensorView(grad), TensorView(input));
  const Tensor rows = detach(grad);
  const Tensor sums = torch::stable::sum(wide(rows), {{0}}, false);
  return {matmul_cpu(torch::stable::transpose(rows, 0, 1), input),
          narrow_to(sums, TensorView(grad).dtype)};
}

}  // namespace torch_cubin
