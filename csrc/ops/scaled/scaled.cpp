// scaled_matmul on CUDA: operands as the kernels read them, copied where no tensor map describes
// them.
#include "ops/scaled/scaled.h"

#include <algorithm>

#include "cubin/error.h"
#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/grouped/grouped.h"
#include "ops/quantize/quantize.h"
#include "ops/scaled/group_blocks.h"
#include "ops/scaled/sm90_scaled.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

constexpr int64_t kRowAlignment = 16;  // addresses and strides of tensor maps are multiples of it

// Rows of an operand, or of each group's, that are contiguous along K.
struct Rows {
  const char* data;
  int64_t stride, group_stride;
};

// The rows of matrices whose dim `k_dim` of 0 and 1 is K, where they are; strides of single rows,
// columns and groups are any. `copy` owns what was copied for that.
Rows rows_of(const Tensor& tensor, int64_t k_dim, std::optional<Tensor>& copy) {
  const TensorView x(tensor);
  const int64_t batch = x.dim - 2, rows = x.sizes[batch + 1 - k_dim], k = x.sizes[batch + k_dim];
  const auto stride_of = [&](int64_t dim) {
    return x.sizes[dim] > 1 ? x.strides[dim] : kRowAlignment;
  };
  const auto aligned = [](int64_t stride) { return stride > 0 && stride % kRowAlignment == 0; };
  const int64_t stride = stride_of(batch + 1 - k_dim);
  const int64_t group_stride = batch == 1 ? stride_of(0) : kRowAlignment;
  const auto data = static_cast<const char*>(x.data());
  if (aligned(stride) && aligned(group_stride) &&
      reinterpret_cast<uintptr_t>(data) % kRowAlignment == 0 &&
      (k == 1 || x.strides[batch + k_dim] == 1)) {
    return {data, stride, group_stride};
  }
  int64_t sizes[] = {0, rows, ceil_div(k, kRowAlignment) * kRowAlignment};
  if (batch == 1) sizes[0] = x.sizes[0];
  copy = empty_cuda(sizes + 1 - batch, x.dim, x.dtype, x.device_index);
  Tensor part = torch::stable::narrow(*copy, -1, 0, k);
  const Tensor own = detach(tensor);
  torch::stable::copy_(part, k_dim == 1 ? own : torch::stable::transpose(own, -2, -1));
  return {static_cast<const char*>(TensorView(*copy).data()), sizes[2], rows * sizes[2]};
}

// The scales at `data`, laid out as `scale`.
OperandScales scales_of(const TensorView& scale, int64_t recipe, const void* data) {
  OperandScales out;
  out.data = static_cast<const float*>(data);
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

void check_sizes(const char* op, const ScaledCall& call) {
  constexpr int64_t kMost = INT32_MAX / 2;
  const int64_t out_rows = call.groups.of_k ? call.m * call.groups.groups : call.m;
  if (std::max({out_rows, call.n, call.k, call.groups.groups}) <= kMost) return;
  fail({"no_kernel", op, "has a size that no kernel takes", "at most " + std::to_string(kMost),
        tuple_text(&call.m, 3) + " as M, N and K", ""});
}

// Groups of a product without K, which no kernel takes: the product of zeros, with a scale of zero
// for all, whatever the recipe, since its kernel also finds wrong ends.
void run_without_k(ScaledCall call, int32_t device_index) {
  call.k = kRowAlignment;
  call.blocks = call.fast = false;
  const int64_t rows = std::max(call.m, call.groups.groups * call.n);
  const int64_t size = std::max<int64_t>(rows * call.k, sizeof(float));
  const Tensor zeros = empty_cuda(&size, 1, ScalarType::Byte, device_index);
  torch::stable::zero_(const_cast<Tensor&>(zeros));
  call.a = call.b = static_cast<const char*>(TensorView(zeros).data());
  call.a_stride = call.b_stride = call.k;
  call.b_group_stride = call.n * call.k;
  call.a_scales.data = call.b_scales.data = reinterpret_cast<const float*>(call.a);
  run_sm90_scaled(device(device_index), call);
}

// The ups of a gated product, where they have a matrix of their own.
struct Ups {
  const Tensor& data;
  const Tensor& scale;
};

bool have_same_strides(const TensorView& a, const TensorView& b) {
  for (int64_t i = 0; i < a.dim; ++i) {
    if (a.sizes[i] > 1 && b.sizes[i] > 1 && a.strides[i] != b.strides[i]) return false;
  }
  return true;
}

// Runs a product whose sizes and outputs are in `call`, and of groups what their ends are limited
// by; K may be 0 of groups alone. `ups`: of a gated one; null: they follow the gates in mat_b.
void run_product(const char* op, ScaledCall call, const Tensor& mat_a, const Tensor& mat_b,
                 const Tensor& scale_a, int64_t recipe_a, const Tensor& scale_b, int64_t recipe_b,
                 const std::optional<Tensor>& offs, const Ups* ups = nullptr) {
  const TensorView x(mat_a), y(mat_b);
  check_sizes(op, call);
  call.a_dtype = x.dtype;
  call.b_dtype = y.dtype;
  call.blocks = is_block(recipe_a);
  std::optional<Tensor> ends;
  if (offs) {
    ends = as_contiguous(*offs);
    const TensorView e(*ends);
    call.groups.ends = e.data();
    call.groups.wide_ends = e.dtype == ScalarType::Long;
  }
  if (call.k == 0) {
    run_without_k(call, x.device_index);
    return;
  }
  std::optional<Tensor> a_copy, b_copy;
  const Rows a = rows_of(mat_a, 1, a_copy), b = rows_of(mat_b, 0, b_copy);
  call.a = a.data;
  call.a_stride = a.stride;
  call.b = b.data;
  call.b_stride = b.stride;
  call.b_group_stride = b.group_stride;
  // Scales of rows of groups of K follow those of the group before.
  const bool follow = call.groups.of_k && !call.blocks;
  const Tensor a_own = follow ? as_contiguous(scale_a) : scale_a;
  const bool align =
      ups != nullptr && !have_same_strides(TensorView(scale_b), TensorView(ups->scale));
  const Tensor b_own = follow || align ? as_contiguous(scale_b) : scale_b;
  const TensorView a_scale(a_own), b_scale(b_own);
  call.a_scales = scales_of(a_scale, recipe_a, a_scale.data());
  if (follow) call.a_scales.stride = 1;
  const bool of_group = offs && (!call.groups.of_k || follow);
  call.b_scales = scales_of(of_group ? group_of(b_scale) : b_scale, recipe_b, b_scale.data());
  if (of_group) call.b_scales_group_stride = b_scale.strides[0];
  std::optional<Tensor> up_copy, up_scale;
  if (ups != nullptr) {
    const Rows up = rows_of(ups->data, 0, up_copy);
    call.b_up = up.data;
    call.b_up_stride = up.stride;
    up_scale = align ? as_contiguous(ups->scale) : ups->scale;
    call.b_up_scales = static_cast<const float*>(TensorView(*up_scale).data());
  } else if (call.gated) {
    call.b_up = call.b + call.n * call.b_stride;
    call.b_up_stride = call.b_stride;
    call.b_up_scales = call.b_scales.data + call.n / kScaleBlock * call.b_scales.stride;
  }
  run_sm90_scaled(device(x.device_index), call);
}

}  // namespace

Tensor scaled_matmul_cuda(const Tensor& mat_a, const Tensor& mat_b, const Tensor& scale_a,
                          int64_t recipe_a, const Tensor& scale_b, int64_t recipe_b,
                          const std::optional<Tensor>& bias, std::optional<ScalarType> out_dtype,
                          bool use_fast_accum) {
  const TensorView x(mat_a), y(mat_b);
  const std::optional<TensorView> z = view_of(bias);
  ScaledCall call;
  call.out_dtype = out_dtype.value_or(ScalarType::BFloat16);
  const Shape shape = check_scaled({kScaledOp, x, y, TensorView(scale_a), TensorView(scale_b),
                                    recipe_a, recipe_b, z, call.out_dtype, use_fast_accum});
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
  call.fast = use_fast_accum && !is_block(recipe_a);
  if (z) {
    call.bias = z->data();
    call.bias_dtype = z->dtype;
    call.bias_stride = z->strides[0];
  }
  call.out = static_cast<char*>(out.mutable_data_ptr());
  run_product(kScaledOp, call, mat_a, mat_b, scale_a, recipe_a, scale_b, recipe_b, std::nullopt);
  return out;
}

Tensor scaled_grouped_product_cuda(const Tensor& mat_a, const Tensor& mat_b, const Tensor& scale_a,
                                   int64_t recipe_a, const Tensor& scale_b, int64_t recipe_b,
                                   const Tensor& offs, std::optional<ScalarType> out_dtype,
                                   bool use_fast_accum) {
  const TensorView x(mat_a), y(mat_b);
  ScaledCall call;
  call.out_dtype = out_dtype.value_or(ScalarType::BFloat16);
  const Shape shape =
      check_scaled_grouped({kScaledGroupedOp, x, y, TensorView(scale_a), TensorView(scale_b),
                            TensorView(offs), recipe_a, recipe_b, call.out_dtype});
  call.m = x.sizes[0];
  call.k = x.sizes[1];
  call.n = y.sizes[y.dim - 1];
  call.groups.of_k = y.dim == 2;
  call.groups.groups = TensorView(offs).sizes[0];
  call.groups.limit = call.groups.of_k ? call.k : call.m;
  check_ends(kScaledGroupedOp, offs, call.groups.limit);
  Tensor out = empty_cuda(shape.sizes, shape.dim, call.out_dtype, x.device_index);
  if (shape.numel() == 0 || call.groups.groups == 0) return out;
  call.out = static_cast<char*>(out.mutable_data_ptr());
  call.fast = use_fast_accum && !is_block(recipe_a);
  run_product(kScaledGroupedOp, call, mat_a, mat_b, scale_a, recipe_a, scale_b, recipe_b, offs);
  return out;
}

Tensor group_blocks_product_cuda(const Quantized& a, const Quantized& b, const GroupBlocks& blocks,
                                 ScalarType dtype) {
  const auto& [mat_a, scale_a] = a;
  const auto& [mat_b, scale_b] = b;
  const TensorView x(mat_a), y(mat_b);
  ScaledCall call;
  call.out_dtype = dtype;
  call.m = x.sizes[0];
  call.n = y.sizes[0];
  call.k = blocks.k;
  call.groups.of_k = true;
  call.groups.groups = blocks.groups;
  call.groups.limit = blocks.k;
  call.groups.table = static_cast<const GroupRow*>(TensorView(blocks.tables).data());
  const int64_t sizes[] = {blocks.groups, call.m, call.n};
  Tensor out = empty_cuda(sizes, 3, dtype, x.device_index);
  call.out = static_cast<char*>(out.mutable_data_ptr());
  run_product(kScaledGroupedOp, call, mat_a, matrices_transposed(mat_b), scale_a, kScaleBlock1x128,
              scale_b, kScaleBlock1x128, std::nullopt);
  return out;
}

Quantized scaled_gated_matmul_cuda(const Tensor& mat_a, const Tensor& mat_b, const Tensor& scale_a,
                                   const Tensor& scale_b, const std::string& gate,
                                   const std::optional<Tensor>& offs,
                                   std::optional<ScalarType> dtype,
                                   const std::optional<Tensor>& mat_up,
                                   const std::optional<Tensor>& scale_up, bool power_of_two) {
  const TensorView x(mat_a), y(mat_b);
  constexpr int64_t kRecipeA = kScaleBlock1x128, kRecipeB = kScaleBlock128x128;
  ScaledCall call;
  call.out_dtype = dtype.value_or(ScalarType::BFloat16);
  check_scaled_gated({x, y, TensorView(scale_a), TensorView(scale_b), gate, view_of(offs),
                      call.out_dtype, view_of(mat_up), view_of(scale_up)});
  call.gated = call.blocks = call.b_scales.of_128_rows = true;
  call.a_dtype = x.dtype;
  call.b_dtype = y.dtype;
  call.m = x.sizes[0];
  call.k = x.sizes[1];
  call.n = mat_up ? y.sizes[1] : y.sizes[y.dim - 1] / 2;
  if (offs) {
    call.groups.groups = y.sizes[0];
    call.groups.limit = call.m;
  }
  const bool any = std::min({call.m, call.n, call.k}) > 0 && (!offs || call.groups.groups > 0);
  if (!any || !is_gated_quicker(device(x.device_index), call, mat_up.has_value())) {
    Tensor product;
    if (mat_up) {
      const int64_t sizes[] = {call.m, 2 * call.n};
      product = empty_cuda(sizes, 2, call.out_dtype, x.device_index);
      if (call.k == 0) torch::stable::zero_(product);
      call.gated = false;
      call.out_stride = 2 * call.n;
      call.out = static_cast<char*>(product.mutable_data_ptr());
      const auto multiply = [&](const Tensor& b, const Tensor& scale) {
        run_product(kScaledGatedOp, call, mat_a, b, scale_a, kRecipeA, scale, kRecipeB, {});
        call.out += call.n * element_size(call.out_dtype);
      };
      if (any) {
        multiply(mat_b, scale_b);
        multiply(*mat_up, *scale_up);
      }
    } else if (offs) {
      product = scaled_grouped_product_cuda(mat_a, mat_b, scale_a, kRecipeA, scale_b, kRecipeB,
                                            *offs, call.out_dtype, false);
    } else {
      product = scaled_matmul_cuda(mat_a, mat_b, scale_a, kRecipeA, scale_b, kRecipeB, std::nullopt,
                                   call.out_dtype, false);
    }
    return quantize_cuda(product, kRecipeA, false, power_of_two, gate, std::nullopt);
  }
  if (offs) check_ends(kScaledGatedOp, *offs, call.groups.limit);
  const int64_t sizes[] = {call.m, call.n}, scale_sizes[] = {call.m, call.n / kScaleBlock};
  const int64_t scale_strides[] = {1, call.m};
  Tensor data = empty_cuda(sizes, 2, ScalarType::Float8_e4m3fn, x.device_index);
  Tensor scales =
      empty_cuda_strided(scale_sizes, scale_strides, 2, ScalarType::Float, x.device_index);
  call.out = static_cast<char*>(data.mutable_data_ptr());
  call.gate_scales = static_cast<float*>(scales.mutable_data_ptr());
  call.gate_power_of_two = power_of_two;
  call.gate_stride = scale_strides[0];
  call.gate_stride_k = scale_strides[1];
  const auto run = [&](const Ups* ups) {
    run_product(kScaledGatedOp, call, mat_a, mat_b, scale_a, kRecipeA, scale_b, kRecipeB, offs,
                ups);
  };
  if (mat_up) {
    const Ups ups{*mat_up, *scale_up};
    run(&ups);
  } else {
    run(nullptr);
  }
  return {data, scales};
}

}  // namespace torch_cubin
