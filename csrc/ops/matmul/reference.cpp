// The CPU kernels: ATen through the dispatcher. References for development and tests only. Our own
// checks run first, so that errors are the same on every device.

#include <algorithm>
#include <vector>

#include "ops/common/aten.h"
#include "ops/common/batch_invariant.h"
#include "ops/common/stable_ops.h"
#include "ops/common/values.h"
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

Tensor aten_matmul(const Tensor& self, const Tensor& other) {
  return call_aten("aten::matmul", self, other);
}

constexpr int64_t kProductsOfAThread = 1 << 15;  // at least: to start one takes as long

// torch.matmul in float64, plus an addend that broadcasts to `shape`, the result's: every element
// is summed from the first k to the last, whatever the other sizes are. (The libraries that ATen
// calls choose an order by all sizes and by addresses.)
Tensor matmul_in_order(const Tensor& self, const Tensor& other, const std::optional<Tensor>& addend,
                       const Shape& shape) {
  const TensorView a(self), b(other);
  const int64_t k = a.sizes[a.dim - 1], n = b.dim > 1 ? b.sizes[b.dim - 1] : 1;
  Tensor left = self, right = other;
  int64_t m = shape.numel() / n;  // rows of one factor
  if (b.dim > 2) {
    m = a.dim > 1 ? a.sizes[a.dim - 2] : 1;
    Sizes a_sizes(shape.sizes, shape.sizes + shape.dim - (a.dim > 1) - 1), b_sizes = a_sizes;
    for (const int64_t size : {m, k}) a_sizes.push_back(size);
    for (const int64_t size : {k, n}) b_sizes.push_back(size);
    left = call_aten("aten::broadcast_to", self, a_sizes);
    right = call_aten("aten::broadcast_to", other, b_sizes);
  }
  Values rows(left), factors(right);
  Values out(a, shape.sizes, shape.dim);
  const double *const a_data = rows.data(), *const b_data = factors.data();
  double* const out_data = out.data();
  const auto some = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      double* sums = out_data + row * n;
      const double *own = a_data + row * k, *factor = b_data + row / m * k * n;
      for (int64_t i = 0; i < k; ++i, factor += n) {
        for (int64_t j = 0; j < n; ++j) sums[j] += own[i] * factor[j];
      }
    }
  };
  const int64_t grain = kProductsOfAThread / std::max<int64_t>(k * n, 1) + 1;
  torch::stable::parallel_for(0, shape.numel() / n, grain, some);
  if (addend) {
    Values added(call_aten("aten::broadcast_to", *addend, shape.vector()));
    for (int64_t i = 0; i < shape.numel(); ++i) out.data()[i] += added.data()[i];
  }
  return out.rounded(a.dtype);
}

Tensor aten_linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  return call_aten("aten::linear", input, weight, bias);
}

// Fills the rows of `out` with compute(row of `a`, [1, columns]), each row in new memory: ATen
// computes the last elements of a tensor by other functions, whose last bits differ.
template <class Compute>
void compute_rows(Tensor a, Tensor& out, Compute&& compute) {
  for (int64_t i = 0; i < a.size(0); ++i) {
    const Tensor row = contiguous_copy(torch::stable::narrow(a, 0, i, 1), {1, a.size(1)});
    Tensor to = torch::stable::narrow(out, 0, i, 1);
    torch::stable::copy_(to, compute(row));
  }
}

}  // namespace

Tensor matmul_cpu(const Tensor& self, const Tensor& other) {
  const Shape shape = check_matmul(TensorView(self), TensorView(other));
  const Tensor a = detach(self), b = detach(other);
  const bool in_order = batch_invariant() && shape.numel() > 0;
  return with_contiguous_strides(
      in_order ? matmul_in_order(a, b, std::nullopt, shape) : aten_matmul(a, b), shape);
}

Tensor linear_cpu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const Shape shape = check_linear(TensorView(input), TensorView(weight), view_of(bias));
  const bool is_vector = TensorView(weight).dim == 1;
  Tensor matrix = detach(weight);
  const Tensor a = detach(input);
  const std::optional<Tensor> addend = bias ? std::optional<Tensor>(detach(*bias)) : std::nullopt;
  if (batch_invariant() && shape.numel() > 0) {
    const Tensor factor = is_vector ? matrix : torch::stable::transpose(matrix, 0, 1);
    return with_contiguous_strides(matmul_in_order(a, factor, addend, shape), shape);
  }
  // ATen supports a vector as weight, but then no bias: the vector becomes a matrix of one row.
  const bool as_row = is_vector && bias;
  if (as_row) matrix = torch::stable::unsqueeze(matrix, 0);
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
  const int64_t columns = TensorView(weight).dim == 2 ? weight.size(0) : 1;
  const int64_t rows = shape.numel() / columns;
  Tensor out = torch::stable::new_empty(sums, Sizes{rows, columns});
  compute_rows(aten_reshape(sums, {rows, columns}), out,
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

std::tuple<Tensor, Tensor> weight_and_bias_gradient_cpu(const Tensor& grad, const Tensor& input) {
  check_weight_gradient(TensorView(grad), TensorView(input));
  const Tensor rows = detach(grad);
  const Tensor sums = torch::stable::sum(wide(rows), {{0}}, false);
  return {matmul_cpu(torch::stable::transpose(rows, 0, 1), input),
          narrow_to(sums, TensorView(grad).dtype)};
}

}  // namespace torch_cubin
