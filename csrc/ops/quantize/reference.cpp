// quantize on the CPU: the definition of quantize_params.h, element by element.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/grouped/grouped.h"
#include "ops/quantize/quantize.h"

namespace torch_cubin {
namespace {

float scale_of(float largest, const QuantizeCall& call) {
  if (largest == 0) return 1;
  const float most = call.dtype == ScalarType::Float8_e5m2 ? 57344 : 448;
  float scale = std::max(largest / most, std::numeric_limits<float>::min());
  if (call.power_of_two) {
    int exponent = 0;
    if (std::frexp(scale, &exponent) != 0.5f) scale = std::ldexp(1.0f, exponent);
  }
  return scale;
}

// The operand (rows, K) in float32.
Tensor operand_of(const Tensor& x, const QuantizeCall& call) {
  Tensor values = torch::stable::to(detach(x), ScalarType::Float);
  if (call.gated) {
    const Tensor gate = call_aten("aten::silu", torch::stable::narrow(values, 1, 0, call.k));
    const Tensor up = torch::stable::narrow(values, 1, call.k, call.k);
    values = call_aten_overload("aten::mul", "Tensor", gate, up);
  }
  // A copy, which is overwritten.
  return torch::stable::clone(
      torch::stable::contiguous(call.transpose ? torch::stable::transpose(values, 0, 1) : values));
}

}  // namespace

Quantized quantize_cpu(const Tensor& x, int64_t recipe, bool transpose, bool power_of_two,
                       const std::string& gate, std::optional<ScalarType> dtype) {
  const TensorView view(x);
  const QuantizeCall call = check_quantize(view, recipe, transpose, power_of_two, gate, dtype);
  Tensor values = operand_of(x, call);
  const Tensor scales =
      empty_near(view, call.scale.sizes, 2, ScalarType::Float, call.scale_strides);
  const int64_t sizes[] = {call.rows, call.k};
  Tensor data = empty_near(view, sizes, 2, call.dtype);
  auto scale = static_cast<float*>(scales.mutable_data_ptr());
  auto value = static_cast<float*>(values.mutable_data_ptr());
  std::vector<float> largest(static_cast<size_t>(call.scale.numel()));
  const auto each = [&](auto visit) {
    for (int64_t row = 0; row < call.rows; ++row) {
      for (int64_t column = 0; column < call.k; ++column) {
        visit(value[row * call.k + column], call.scale_at(row, column));
      }
    }
  };
  each([&](float& own, int64_t at) {
    if (std::isinf(own)) own = std::numeric_limits<float>::quiet_NaN();
    if (std::abs(own) > largest[at]) largest[at] = std::abs(own);
  });
  for (size_t i = 0; i < largest.size(); ++i) scale[i] = scale_of(largest[i], call);
  each([&](float& own, int64_t at) { own *= 1 / scale[at]; });
  torch::stable::copy_(data, values);
  return {data, scales};
}

Quantized quantize_rows_cpu(const Tensor& x, const std::optional<Tensor>& numbers) {
  const Tensor rows = numbers ? rows_by_number(detach(x), *numbers) : x;
  return quantize_cpu(rows, kScaleBlock1x128, false, false, "none", std::nullopt);
}

Quantized quantize_groups_cpu(const Tensor& x, const std::optional<Tensor>& numbers,
                              const GroupBlocks& blocks) {
  // Of each K the row, -1 of K between groups.
  const Tensor apart = empty_near(TensorView(x), &blocks.k, 1, ScalarType::Int);
  torch::stable::fill_(const_cast<Tensor&>(apart), -1);
  auto* row = static_cast<int32_t*>(apart.mutable_data_ptr());
  const auto ends = ends_on_host(blocks.ends), in_k = ends_on_host(blocks.tables);
  for (size_t group = 0; group < ends.size(); ++group) {
    const int64_t start = group == 0 ? 0 : ends[group - 1], to = group == 0 ? 0 : in_k[group - 1];
    for (int64_t i = start; i < ends[group]; ++i) row[to + i - start] = static_cast<int32_t>(i);
  }
  const Tensor rows = numbers ? rows_by_number(detach(x), *numbers) : detach(x);
  return quantize_cpu(rows_by_number(rows, apart), kScaleBlock1x128, true, false, "none",
                      std::nullopt);
}

QuantizedBoth quantize_weight_cpu(const Tensor& x) {
  const auto of = [&](bool transpose) {
    return quantize_cpu(x, kScaleBlock128x128, transpose, false, "none", std::nullopt);
  };
  return {of(false), of(true)};
}

}  // namespace torch_cubin
