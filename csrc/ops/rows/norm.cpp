// Layer norm, RMS norm and their derivative on CUDA, by csrc/kernels/rows/norm*.cu.
#include <algorithm>
#include <cmath>

#include "kernels/rows/norm_params.h"
#include "ops/common/stable_ops.h"
#include "ops/rows/kernels.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

// norm_columns: rows of a part at least, and most parts.
constexpr int64_t kRowsOfPart = 256, kMostParts = 64;

Tensor empty_like_rows(const TensorView& x) {
  return empty_cuda(x.sizes, x.dim, x.dtype, x.device_index);
}

void* written(const Tensor& tensor) { return tensor.mutable_data_ptr(); }
float* floats(const Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }

// The gradient of x, with sums over parts of the rows in `sums_w` and `sums_b`, and the gradients
// of weight and bias that are these sums' sums; each where its tensor is not null.
void differentiate_with_sums(NormParams& p, const Device& gpu, const RowSizes& sizes,
                             ScalarType dtype, const Tensor* grad_weight, const Tensor* grad_bias) {
  const SumsLayout layout(gpu, sizes, dtype, p.grad_sum != nullptr);
  const bool fused = layout.kernel != nullptr;
  const int64_t parts =
      fused ? layout.parts : std::clamp<int64_t>(ceil_div(sizes.rows, kRowsOfPart), 1, kMostParts);
  const int64_t bytes = parts * sizes.columns * 4;
  const Workspace of_weight(gpu, grad_weight ? bytes : 0), of_bias(gpu, grad_bias ? bytes : 0);
  if (grad_weight) p.sums_w = reinterpret_cast<float*>(of_weight.data());
  if (grad_bias) p.sums_b = reinterpret_cast<float*>(of_bias.data());
  PackageKernel& columns = rows_kernel(kNormColumns, dtype, gpu);
  const int64_t blocks = blocks_of_columns(sizes);
  if (fused) {
    p.rows = sizes.rows;
    p.columns = static_cast<int>(sizes.columns);
    p.threads = static_cast<int>(layout.threads);
    p.cluster = static_cast<int>(layout.cluster);
    p.vectors = static_cast<int>(layout.vectors);
    launch(*layout.kernel, layout.grid, gpu, p);
  } else {
    launch_rows(kNormBackward, p, gpu, sizes, dtype);
    p.parts = static_cast<int>(parts);
    launch(columns, {blocks, parts}, gpu, p);
  }
  p.sums_parts = static_cast<int>(parts);
  p.grad_weight = grad_weight ? written(*grad_weight) : nullptr;
  p.grad_bias = grad_bias ? written(*grad_bias) : nullptr;
  launch(columns, {blocks}, gpu, p);
}

}  // namespace

Normed norm_cuda(const Tensor& input, const OptionalTensor& residual,
                 const std::vector<int64_t>& normalized_shape, const OptionalTensor& weight,
                 const OptionalTensor& bias, std::optional<double> eps, bool centered) {
  const char* op = norm_name(centered, residual.has_value());
  const TensorView x(input);
  const auto dims = static_cast<int64_t>(normalized_shape.size());
  const RowSizes sizes =
      check_norm(op, x, view_of(residual), normalized_shape, view_of(weight), view_of(bias));
  NormParams p{};
  p.row_dtype = row_dtype(op, x.dtype);
  check_length(op, sizes);
  const Shape statistics = statistics_shape(x, dims);
  const auto new_statistics = [&] {
    return empty_cuda(statistics.sizes, statistics.dim, ScalarType::Float, x.device_index);
  };
  const Tensor out = empty_like_rows(x);
  const Tensor sum = residual ? empty_like_rows(x) : no_elements(x, x.dtype);
  const Tensor mean = centered ? new_statistics() : no_elements(x, ScalarType::Float);
  const Tensor rstd = new_statistics();
  Normed result{out, sum, mean, rstd};
  if (sizes.rows == 0) return result;
  if (sizes.columns == 0) {
    torch::stable::fill_(mean, NAN);
    torch::stable::fill_(rstd, NAN);
    return result;
  }
  std::optional<RowsOperand> own[4];
  const auto read = [&](int index, const Tensor& tensor) -> const RowsOperand& {
    return own[index].emplace(tensor, dims, sizes);
  };
  p.x = read(0, input).data;
  p.x_stride = own[0]->stride;
  if (residual) {
    p.residual = read(1, *residual).data;
    p.residual_stride = own[1]->stride;
    p.sum = written(sum);
  }
  if (weight) {
    p.weight = read(2, *weight).data;
    p.weight_dtype = row_dtype(op, TensorView(*weight).dtype);
  }
  if (bias) {
    p.bias = read(3, *bias).data;
    p.bias_dtype = row_dtype(op, TensorView(*bias).dtype);
  }
  p.out = written(out);
  if (centered) p.mean = floats(mean);
  p.rstd = floats(rstd);
  p.centered = centered;
  p.eps = static_cast<float>(eps_of(eps, x.dtype));
  launch_rows(kNorm, p, device(x.device_index), sizes, x.dtype);
  return result;
}

NormGradients norm_backward_cuda(const Tensor& grad_out, const OptionalTensor& grad_sum,
                                 const Tensor& x_tensor, const Tensor& mean, const Tensor& rstd,
                                 const OptionalTensor& weight, int64_t dims,
                                 std::optional<double> /*eps*/, bool centered, bool needs_weight,
                                 std::optional<ScalarType> bias_dtype) {
  constexpr const char* kOp = "_norm_backward";
  const TensorView x(x_tensor);
  const RowSizes sizes =
      check_norm_backward(TensorView(grad_out), view_of(grad_sum), x, TensorView(mean),
                          TensorView(rstd), view_of(weight), dims, centered);
  NormParams p{};
  p.row_dtype = row_dtype(kOp, x.dtype);
  check_length(kOp, sizes);
  needs_weight = needs_weight && weight;
  const auto gradient = [&](bool needed, ScalarType dtype) {
    if (!needed) return no_elements(x, dtype);
    return empty_cuda(x.sizes + x.dim - dims, dims, dtype, x.device_index);
  };
  const ScalarType weight_dtype = weight ? TensorView(*weight).dtype : x.dtype;
  const Tensor grad_x = empty_like_rows(x);
  const Tensor grad_weight = gradient(needs_weight, weight_dtype);
  const Tensor grad_bias = gradient(bias_dtype.has_value(), bias_dtype.value_or(x.dtype));
  NormGradients result{grad_x, grad_weight, grad_bias};
  if (sizes.rows == 0) {
    torch::stable::fill_(grad_weight, 0);
    torch::stable::fill_(grad_bias, 0);
    return result;
  }
  if (sizes.columns == 0) return result;
  const RowsOperand x_rows(x_tensor, dims, sizes), grad_rows(grad_out, dims, sizes);
  std::optional<RowsOperand> sum_rows, weight_rows;
  const Tensor rstd_dense = torch::stable::contiguous(rstd);
  const Tensor mean_dense = torch::stable::contiguous(mean);
  p.x = x_rows.data;
  p.x_stride = x_rows.stride;
  p.grad_out = grad_rows.data;
  p.grad_out_stride = grad_rows.stride;
  if (grad_sum) {
    sum_rows.emplace(*grad_sum, dims, sizes);
    p.grad_sum = sum_rows->data;
    p.grad_sum_stride = sum_rows->stride;
  }
  if (weight) {
    weight_rows.emplace(*weight, dims, sizes);
    p.weight = weight_rows->data;
  }
  p.weight_dtype = row_dtype(kOp, weight_dtype);
  p.bias_dtype = row_dtype(kOp, bias_dtype.value_or(x.dtype));
  p.grad_x = written(grad_x);
  p.mean = centered ? floats(mean_dense) : nullptr;
  p.rstd = floats(rstd_dense);
  p.centered = centered;
  const Device& gpu = device(x.device_index);
  if (needs_weight || bias_dtype) {
    differentiate_with_sums(p, gpu, sizes, x.dtype, needs_weight ? &grad_weight : nullptr,
                            bias_dtype ? &grad_bias : nullptr);
  } else {
    launch_rows(kNormBackward, p, gpu, sizes, x.dtype);
  }
  return result;
}

}  // namespace torch_cubin
