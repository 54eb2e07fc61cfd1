// scaled_matmul on the CPU: the float32 product of the dequantised operands.
#include <cmath>
#include <vector>

#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/matmul/elementwise.h"
#include "ops/scaled/scaled.h"

namespace torch_cubin {
namespace {

Tensor repeated(const Tensor& scale, int64_t dim, int64_t size) {
  const Tensor all = call_aten_overload("aten::repeat_interleave", "self_int", scale, kScaleBlock,
                                        std::optional<int64_t>(dim), std::optional<int64_t>());
  return torch::stable::narrow(const_cast<Tensor&>(all), dim, 0, size);
}

// The scales of each element of an operand (size, k).
Tensor scale_of_each(const Tensor& scale, int64_t recipe, int64_t size, int64_t k) {
  switch (recipe) {
    case kScaleTensor:
      return call_aten("aten::reshape", scale, std::vector<int64_t>{1, 1});
    case kScaleRow:
      return call_aten("aten::reshape", scale, std::vector<int64_t>{size, 1});
    case kScaleBlock1x128:
      return repeated(scale, 1, k);
    default:
      return repeated(repeated(torch::stable::transpose(scale, 0, 1), 1, k), 0, size);
  }
}

Tensor dequantised(const Tensor& x, const Tensor& scale, int64_t recipe) {
  const Tensor values = torch::stable::to(x, ScalarType::Float);
  const Tensor scales = scale_of_each(scale, recipe, values.size(0), values.size(1));
  return call_aten_overload("aten::mul", "Tensor", values, scales);
}

// To the largest number of float8_e4m3fn; NaN stays.
void saturate(Tensor& contiguous) {
  constexpr float kLargest = 448;
  auto values = static_cast<float*>(contiguous.mutable_data_ptr());
  for (int64_t i = 0; i < contiguous.numel(); ++i) {
    if (std::abs(values[i]) > kLargest) values[i] = std::copysign(kLargest, values[i]);
  }
}

}  // namespace

Tensor scaled_matmul_cpu(const Tensor& mat_a, const Tensor& mat_b, const Tensor& scale_a,
                         int64_t recipe_a, const Tensor& scale_b, int64_t recipe_b,
                         const std::optional<Tensor>& bias, std::optional<ScalarType> out_dtype,
                         bool use_fast_accum) {
  const TensorView a(mat_a);
  const ScalarType dtype = out_dtype.value_or(ScalarType::BFloat16);
  const Shape shape =
      check_scaled({kScaledOp, a, TensorView(mat_b), TensorView(scale_a), TensorView(scale_b),
                    recipe_a, recipe_b, view_of(bias), dtype, use_fast_accum});
  const Tensor columns = torch::stable::transpose(detach(mat_b), 0, 1);
  const Tensor x = dequantised(detach(mat_a), detach(scale_a), recipe_a);
  const Tensor y = dequantised(columns, detach(scale_b), recipe_b);
  Tensor product = torch::stable::matmul(x, torch::stable::transpose(y, 0, 1));
  if (bias) {
    const Tensor row = torch::stable::to(detach(*bias), ScalarType::Float);
    product = scaled_addend(product, row, 1);
  }
  if (dtype == ScalarType::Float8_e4m3fn) saturate(product);
  Tensor out = empty_near(a, shape.sizes, shape.dim, dtype);
  torch::stable::copy_(out, product);
  return out;
}

}  // namespace torch_cubin
