#include "ops/scaled/aten_scaled_grouped.h"

#include "ops/common/serving.h"
#include "ops/common/stable_ops.h"
#include "ops/scaled/aten_scaled.h"
#include "ops/scaled/scaled.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

struct AtenGroupedCall {
  TensorView a, b, scale_a, scale_b;
  std::optional<TensorView> offs;
  bool has_bias, has_scale_result;
  std::optional<ScalarType> out_dtype;

  bool of_k() const { return b.dim == 2; }
};

const AtenOp& scaled_grouped_op() {
  static const AtenOp op("aten::_scaled_grouped_mm", CallKind::kScaled);  // and _v2
  return op;
}

const char* why_not_grouped_options(const AtenGroupedCall& x) {
  if (x.has_bias) return "a bias";
  if (x.has_scale_result) return "a scale of the result";
  if (x.out_dtype != ScalarType::BFloat16) return "an out_dtype that is not bfloat16";
  return nullptr;
}

const char* why_not_grouped_operands(const AtenGroupedCall& x) {
  const int64_t k = x.b.dim - 2;  // the dim of b
  if (x.a.dim != 2 || k < 0 || k > 1 || !x.offs || x.offs->dim != 1 ||
      x.a.sizes[1] != x.b.sizes[k] || (!x.of_k() && x.offs->sizes[0] != x.b.sizes[0])) {
    return "shapes that it does not take";
  }
  if (x.offs->dtype != ScalarType::Int) return "offs that are not int32";
  if (x.a.strides[1] != 1 || x.b.strides[k] != 1) return "operands that are not contiguous along K";
  if (x.a.sizes[1] % kScaledMultiple != 0 || x.b.sizes[k + 1] % kScaledMultiple != 0) {
    return "sizes that are no multiples of 16";
  }
  if (x.b.dtype != ScalarType::Float8_e4m3fn || x.a.dtype != ScalarType::Float8_e4m3fn) {
    return "dtypes other than float8_e4m3fn";
  }
  for (const TensorView* other : {&x.b, &x.scale_a, &x.scale_b, &*x.offs}) {
    if (!same_device(*other, x.a)) return "tensors on different devices";
  }
  return nullptr;
}

const char* why_not_grouped_scales(const AtenGroupedCall& x) {
  if (x.scale_a.dtype != ScalarType::Float || x.scale_b.dtype != ScalarType::Float) {
    return "scales that are not float32";
  }
  if (x.of_k()) {  // a group's scales follow those of the one before it
    const int64_t groups = x.offs->sizes[0];
    const auto fits = [&](const TensorView& scale, int64_t size) {
      return scale.dim == 1 && scale.sizes[0] == groups * size && scale.strides[0] == 1;
    };
    const bool both = fits(x.scale_a, x.a.sizes[0]) && fits(x.scale_b, x.b.sizes[1]);
    return both ? nullptr : "scales that are not of rows";
  }
  const bool fits = x.scale_a.dim == 1 && x.scale_a.sizes[0] == x.a.sizes[0] &&
                    x.scale_b.dim == 2 && x.scale_b.sizes[0] == x.b.sizes[0] &&
                    x.scale_b.sizes[1] == x.b.sizes[2] && x.scale_a.strides[0] == 1 &&
                    x.scale_b.strides[1] == 1;
  return fits ? nullptr : "scales that are not of rows";
}

const char* why_not_scaled_grouped(const AtenGroupedCall& x, Policy policy) {
  if (const char* reason = why_not_grouped_options(x)) return reason;
  if (const char* reason = why_not_grouped_operands(x)) return reason;
  if (const char* reason = why_not_grouped_scales(x)) return reason;
  // Of uneven groups, and of few elements each, PyTorch's were quicker (bench_grouped_fp8.py).
  if (x.of_k() && policy == Policy::kFastest) return "groups that divide K, slower of small groups";
  if (x.a.on_cuda() && device(x.a.device_index).sm != kScaledSm) {
    return "no kernels of 8-bit floats for this GPU";
  }
  return why_not_tensor(x.a, CallKind::kScaled, policy);
}

}  // namespace

std::vector<Tensor> aten_scaled_grouped_mm(const Tensor& self, const Tensor& mat2,
                                           const Tensor& scale_a, const Tensor& scale_b,
                                           const std::optional<Tensor>& offs,
                                           const std::optional<Tensor>& bias,
                                           const std::optional<Tensor>& scale_result,
                                           std::optional<ScalarType> out_dtype,
                                           bool use_fast_accum) {
  const Policy policy = serving_policy();
  if (policy == Policy::kOff) return {};
  const AtenGroupedCall call{TensorView(self),         TensorView(mat2), TensorView(scale_a),
                             TensorView(scale_b),      view_of(offs),    bias.has_value(),
                             scale_result.has_value(), out_dtype};
  if (const char* reason = why_not_scaled_grouped(call, policy)) {
    count_declined(scaled_grouped_op().name, reason);
    return {};
  }
  const ServedCall served;
  const auto& run = call.a.on_cuda() ? scaled_grouped_product_cuda : scaled_grouped_product_cpu;
  const auto of_groups = [&](const Tensor& scale, int64_t size) {
    return call.of_k() ? torch::stable::view(scale, {call.offs->sizes[0], size}) : scale;
  };
  Tensor result =
      run(self, mat2, of_groups(scale_a, call.a.sizes[0]), kScaleRow,
          of_groups(scale_b, call.b.sizes[1]), kScaleRow, *offs, out_dtype, use_fast_accum);
  scaled_grouped_op().count_served(call.a);
  return {result};
}

std::vector<Tensor> aten_scaled_grouped_mm_v2(
    const Tensor& self, const Tensor& mat2, const std::vector<Tensor>& scales_a,
    const std::vector<int64_t>& recipes_a, const std::vector<int64_t>& swizzles_a,
    const std::vector<Tensor>& scales_b, const std::vector<int64_t>& recipes_b,
    const std::vector<int64_t>& swizzles_b, const std::optional<Tensor>& offs,
    const std::optional<Tensor>& bias, std::optional<ScalarType> out_dtype,
    const std::vector<int64_t>& contraction_dim, bool use_fast_accum) {
  if (serving_policy() == Policy::kOff) return {};
  const char* reason = why_not_lists(
      {scales_a, scales_b, recipes_a, recipes_b, swizzles_a, swizzles_b, contraction_dim});
  if (!reason && (recipes_a[0] != kScaleRow || recipes_b[0] != kScaleRow)) {
    reason = "scales that are not of rows";
  }
  if (reason) {
    count_declined(scaled_grouped_op().name, reason);
    return {};
  }
  return aten_scaled_grouped_mm(self, mat2, scales_a[0], scales_b[0], offs, bias, std::nullopt,
                                out_dtype, use_fast_accum);
}

}  // namespace torch_cubin
