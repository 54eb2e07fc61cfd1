// scaled_matmul on CUDA: operands as the kernels read them, copied where no tensor map describes
// them.
#include "ops/scaled/scaled.h"

#include <algorithm>

#include "cubin/error.h"
#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/scaled/sm90_scaled.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

constexpr int64_t kRowAlignment = 16;  // addresses and strides of tensor maps are multiples of it

// Rows of an operand that are contiguous along K.
struct Rows {
  const char* data;
  int64_t stride;
};

// The rows of the operand whose dim `k_dim` is K, where they are; strides of single rows and
// columns are any. `copy` owns what was copied for that.
Rows rows_of(const Tensor& tensor, int64_t k_dim, std::optional<Tensor>& copy) {
  const TensorView x(tensor);
  const int64_t rows = x.sizes[1 - k_dim], k = x.sizes[k_dim];
  const int64_t stride = rows > 1 ? x.strides[1 - k_dim] : kRowAlignment;
  const auto data = static_cast<const char*>(x.data());
  const bool aligned = stride > 0 && stride % kRowAlignment == 0 &&
                       reinterpret_cast<uintptr_t>(data) % kRowAlignment == 0;
  if (aligned && (k == 1 || x.strides[k_dim] == 1)) return {data, stride};
  const int64_t sizes[] = {rows, ceil_div(k, kRowAlignment) * kRowAlignment};
  copy = empty_cuda(sizes, 2, x.dtype, x.device_index);
  Tensor part = torch::stable::narrow(*copy, 1, 0, k);
  const Tensor own = detach(tensor);
  torch::stable::copy_(part, k_dim == 1 ? own : torch::stable::transpose(own, 0, 1));
  return {static_cast<const char*>(TensorView(*copy).data()), sizes[1]};
}

OperandScales scales_of(const TensorView& scale, int64_t recipe) {
  OperandScales out;
  out.data = static_cast<const float*>(scale.data());
  if (recipe == kScaleRow) {
    for (int64_t i = 0; i < scale.dim; ++i) {
      if (scale.sizes[i] > 1) out.stride = scale.strides[i];
    }
  } else if (recipe == kScaleBlock1x128) {
    out.stride = scale.strides[0];
    out.stride_k = scale.strides[1];
  } else if (recipe == kScaleBlock128x128) {
    out.stride = scale.strides[1];
    out.stride_k = scale.strides[0];
    out.of_128_rows = true;
  }
  return out;
}

void check_sizes(const ScaledCall& call) {
  constexpr int64_t kMost = INT32_MAX / 2;
  if (std::max({call.m, call.n, call.k}) <= kMost) return;
  fail({"no_kernel", kScaledOp, "has a size that no kernel takes",
        "at most " + std::to_string(kMost), tuple_text(&call.m, 3) + " as M, N and K", ""});
}

}  // namespace

Tensor scaled_matmul_cuda(const Tensor& mat_a, const Tensor& mat_b, const Tensor& scale_a,
                          int64_t recipe_a, const Tensor& scale_b, int64_t recipe_b,
                          const std::optional<Tensor>& bias, std::optional<ScalarType> out_dtype,
                          bool use_fast_accum) {
  const TensorView x(mat_a), y(mat_b), x_scale(scale_a), y_scale(scale_b);
  const std::optional<TensorView> z = view_of(bias);
  ScaledCall call;
  call.out_dtype = out_dtype.value_or(ScalarType::BFloat16);
  const Shape shape =
      check_scaled({x, y, x_scale, y_scale, recipe_a, recipe_b, z, call.out_dtype, use_fast_accum});
  call.m = x.sizes[0];
  call.k = x.sizes[1];
  call.n = y.sizes[1];
  Tensor out = empty_cuda(shape.sizes, shape.dim, call.out_dtype, x.device_index);
  if (shape.numel() == 0) return out;
  if (call.k == 0) {
    torch::stable::zero_(out);
    if (bias) torch::stable::copy_(out, detach(*bias));
    return out;
  }
  check_sizes(call);
  call.a_dtype = x.dtype;
  call.b_dtype = y.dtype;
  std::optional<Tensor> a_copy, b_copy;
  const Rows a = rows_of(mat_a, 1, a_copy);
  const Rows b = rows_of(mat_b, 0, b_copy);
  call.a = a.data;
  call.a_stride = a.stride;
  call.b = b.data;
  call.b_stride = b.stride;
  call.blocks = is_block(recipe_a);
  call.fast = use_fast_accum && !call.blocks;
  call.a_scales = scales_of(x_scale, recipe_a);
  call.b_scales = scales_of(y_scale, recipe_b);
  if (z) {
    call.bias = z->data();
    call.bias_dtype = z->dtype;
    call.bias_stride = z->strides[0];
  }
  call.out = static_cast<char*>(out.mutable_data_ptr());
  run_sm90_scaled(device(x.device_index), call);
  return out;
}

}  // namespace torch_cubin
