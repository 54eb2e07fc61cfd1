// Layer norm, RMS norm and their derivative on CUDA, by csrc/kernels/rows/norm*.cu.
#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/rows/norm_params.h"
#include "ops/common/stable_ops.h"
#include "ops/rows/kernels.h"
#include "pytorch/contiguous.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

// norm_columns: rows of a part at least, and most parts.
constexpr int64_t kRowsOfPart = 256, kMostParts = 64;

// norm_block: columns of layer norm at most. Longer rows are quicker in shared memory (8192 x 4096,
// H200: 35.9, 35.2 us; RMS norm 33.3, 34.0, with a residual, for the same bits, 67.6, 67.0, but
// 3.02, 3.25 of 256 rows).
constexpr int64_t kMostCenteredColumns = 2048;

Tensor empty_like_rows(const TensorView& x) {
  return empty_cuda(x.sizes, x.dim, x.dtype, x.device_index);
}

void* written(const Tensor& tensor) { return tensor.mutable_data_ptr(); }
float* floats(const Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }
// Of an argument, which a kernel only reads. Throws [input] if it has no memory.
float* saved(const Tensor& tensor) {
  return const_cast<float*>(static_cast<const float*>(TensorView(tensor).data()));
}

// As the kernels read it; a copy if it is not contiguous. Most are, and a call of PyTorch's
// contiguous() would cost the host more than all other checks of a call.
Tensor dense(const Tensor& statistics) {
  const TensorView view(statistics);
  return is_contiguous(view.sizes, view.strides, view.dim) ? statistics
                                                           : torch::stable::contiguous(statistics);
}

// The kernel that normalizes.
RowsKind norm_kind(const NormParams& p, const RowSizes& sizes, ScalarType dtype,
                   const Device& gpu) {
  const bool own_dtype = (p.weight == nullptr || p.weight_dtype == p.row_dtype) &&
                         (p.bias == nullptr || p.bias_dtype == p.row_dtype);
  if (!own_dtype) return kNorm;
  if (p.bias != nullptr && !p.centered) return kNorm;
  if (has_held_rows(kNormWarp, sizes, dtype, gpu)) return kNormWarp;
  if (p.bias != nullptr && p.weight == nullptr) return kNorm;
  if (has_held_rows(kNormBlock, sizes, dtype, gpu) &&
      (!p.centered || sizes.columns <= kMostCenteredColumns)) {
    return kNormBlock;
  }
  return has_staged_rows(kNormStaged, sizes, dtype, gpu) ? kNormStaged : kNorm;
}

// The gradient of x unless p.grad_x is null, with sums over parts of the rows, and the gradients of
// weight and bias that are these sums' sums; each where its tensor is not null.
void differentiate_with_sums(NormParams& p, const Device& gpu, const RowSizes& sizes,
                             ScalarType dtype, const OptionalTensor& grad_weight,
                             const OptionalTensor& grad_bias) {
  std::optional<SumsLayout> layout;
  if (p.grad_x != nullptr) {
    layout.emplace(gpu, sizes, dtype, p.grad_sum != nullptr, p.centered || grad_bias);
  }
  const bool fused = layout && layout->kernel != nullptr;
  p.grad_weight = grad_weight ? written(*grad_weight) : nullptr;
  p.grad_bias = grad_bias ? written(*grad_bias) : nullptr;
  const auto describe_sums = [&] {
    p.rows = sizes.rows;
    p.columns = static_cast<int>(sizes.columns);
    p.threads = static_cast<int>(layout->threads);
    p.cluster = static_cast<int>(layout->cluster);
    p.vectors = static_cast<int>(layout->vectors);
  };
  if (fused && (p.weight == nullptr || p.weight_dtype == p.row_dtype)) {
    const FewRowsLayout few(gpu, sizes, dtype, *layout);
    if (few.kernel != nullptr) {
      describe_sums();
      p.cluster = static_cast<int>(few.cluster);
      p.parts = static_cast<int>(few.blocks_of_columns);
      launch(*few.kernel, few.grid, gpu, p);
      return;
    }
  }
  const int64_t parts =
      fused ? layout->parts : std::clamp<int64_t>(ceil_div(sizes.rows, kRowsOfPart), 1, kMostParts);
  const int64_t elements = parts * sizes.columns;
  const int64_t kinds = (grad_weight ? 1 : 0) + (grad_bias ? 1 : 0);
  const Workspace sums(gpu, kinds * elements * 4);
  auto* next = reinterpret_cast<float*>(sums.data());
  if (grad_weight) p.sums_w = std::exchange(next, next + elements);
  if (grad_bias) p.sums_b = next;
  if (fused) {
    describe_sums();
    launch(*layout->kernel, layout->grid, gpu, p);
  } else {
    if (p.grad_x != nullptr) launch_rows(kNormBackward, p, gpu, sizes, dtype);
    p.rows = sizes.rows;
    p.columns = static_cast<int>(sizes.columns);
    p.parts = static_cast<int>(parts);
    launch(rows_kernel(kNormColumns, dtype, gpu), {blocks_of_columns(sizes), parts}, gpu, p);
  }
  p.sums_parts = static_cast<int>(parts);
  launch(rows_kernel(kNormParts, ScalarType::Float, gpu), {blocks_of_parts(sizes), kinds}, gpu, p);
}

}  // namespace

NormResults normalize(const Tensor& input, const OptionalTensor& residual,
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
  NormResults result{empty_like_rows(x), std::nullopt, std::nullopt, new_statistics()};
  if (residual) result.sum = empty_like_rows(x);
  if (centered) result.mean = new_statistics();
  if (sizes.rows == 0) return result;
  if (sizes.columns == 0) {
    if (centered) torch::stable::fill_(*result.mean, NAN);
    torch::stable::fill_(result.rstd, NAN);
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
    p.sum = written(*result.sum);
  }
  if (weight) {
    p.weight = read(2, *weight).data;
    p.weight_dtype = row_dtype(op, TensorView(*weight).dtype);
  }
  if (bias) {
    p.bias = read(3, *bias).data;
    p.bias_dtype = row_dtype(op, TensorView(*bias).dtype);
  }
  p.out = written(result.out);
  if (centered) p.mean = floats(*result.mean);
  p.rstd = floats(result.rstd);
  p.centered = centered;
  p.eps = static_cast<float>(eps_of(eps, x.dtype));
  const Device& gpu = device(x.device_index);
  launch_rows(norm_kind(p, sizes, x.dtype, gpu), p, gpu, sizes, x.dtype, residual ? 2 : 1);
  return result;
}

Normed norm_cuda(const Tensor& input, const OptionalTensor& residual,
                 const std::vector<int64_t>& normalized_shape, const OptionalTensor& weight,
                 const OptionalTensor& bias, std::optional<double> eps, bool centered) {
  const NormResults made =
      normalize(input, residual, normalized_shape, weight, bias, eps, centered);
  const TensorView x(input);
  return {made.out, made.sum ? *made.sum : no_elements(x, x.dtype),
          made.mean ? *made.mean : no_elements(x, ScalarType::Float), made.rstd};
}

NormGradientsFound differentiate_norm(const Tensor& grad_out, const OptionalTensor& grad_sum,
                                      const Tensor& x_tensor, const Tensor* mean,
                                      const Tensor& rstd, const OptionalTensor& weight,
                                      int64_t dims, const NormGradientsWanted& wanted) {
  constexpr const char* kOp = "_norm_backward";
  const TensorView x(x_tensor);
  const bool centered = mean != nullptr;
  const TensorView rstd_view(rstd);
  const RowSizes sizes = check_norm_backward(TensorView(grad_out), view_of(grad_sum), x,
                                             centered ? TensorView(*mean) : rstd_view, rstd_view,
                                             view_of(weight), dims, centered);
  NormParams p{};
  p.row_dtype = row_dtype(kOp, x.dtype);
  check_length(kOp, sizes);
  const ScalarType weight_dtype = weight ? TensorView(*weight).dtype : x.dtype;
  const auto of_row = [&](ScalarType dtype) {
    return empty_cuda(x.sizes + x.dim - dims, dims, dtype, x.device_index);
  };
  NormGradientsFound result;
  if (wanted.x) result.x = empty_like_rows(x);
  if (wanted.weight && weight) result.weight = of_row(weight_dtype);
  if (wanted.bias) result.bias = of_row(*wanted.bias);
  if (sizes.rows == 0) {
    if (result.weight) torch::stable::fill_(*result.weight, 0);
    if (result.bias) torch::stable::fill_(*result.bias, 0);
    return result;
  }
  if (sizes.columns == 0) return result;
  const RowsOperand x_rows(x_tensor, dims, sizes), grad_rows(grad_out, dims, sizes);
  std::optional<RowsOperand> sum_rows, weight_rows;
  const Tensor rstd_dense = dense(rstd);
  OptionalTensor mean_dense;
  if (centered) mean_dense = dense(*mean);
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
  p.bias_dtype = row_dtype(kOp, wanted.bias.value_or(x.dtype));
  p.grad_x = result.x ? written(*result.x) : nullptr;
  p.mean = centered ? saved(*mean_dense) : nullptr;
  p.rstd = saved(rstd_dense);
  p.centered = centered;
  const Device& gpu = device(x.device_index);
  if (result.weight || result.bias) {
    differentiate_with_sums(p, gpu, sizes, x.dtype, result.weight, result.bias);
  } else if (result.x) {
    launch_rows(kNormBackward, p, gpu, sizes, x.dtype);
  }
  return result;
}

NormGradients norm_backward_cuda(const Tensor& grad_out, const OptionalTensor& grad_sum,
                                 const Tensor& x_tensor, const Tensor& mean, const Tensor& rstd,
                                 const OptionalTensor& weight, int64_t dims,
                                 std::optional<double> /*eps*/, bool centered, bool needs_weight,
                                 std::optional<ScalarType> bias_dtype) {
  const auto [grad_x, grad_weight, grad_bias] =
      differentiate_norm(grad_out, grad_sum, x_tensor, centered ? &mean : nullptr, rstd, weight,
                         dims, {true, needs_weight, bias_dtype});
  const TensorView x(x_tensor);
  const ScalarType weight_dtype = weight ? TensorView(*weight).dtype : x.dtype;
  return {*grad_x, grad_weight ? *grad_weight : no_elements(x, weight_dtype),
          grad_bias ? *grad_bias : no_elements(x, x.dtype)};
}

}  // namespace torch_cubin
