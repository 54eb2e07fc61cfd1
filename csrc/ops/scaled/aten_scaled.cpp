#include "ops/scaled/aten_scaled.h"

#include <functional>
#include <numeric>

#include "ops/common/serving.h"
#include "ops/scaled/scaled.h"
#include "pytorch/aten_kernels.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

struct Call {
  TensorView a, b, scale_a, scale_b;
  std::optional<TensorView> bias, scale_result;
  std::optional<ScalarType> out_dtype;
  bool fast;
};

int64_t numel(const TensorView& x) {
  return std::accumulate(x.sizes, x.sizes + x.dim, int64_t{1}, std::multiplies<>());
}

bool of_tensors(const Call& x) { return numel(x.scale_a) == 1 && numel(x.scale_b) == 1; }

// As PyTorch recognises scales of rows and columns.
bool is_by_rows(const Call& x) {
  const TensorView &a = x.scale_a, &b = x.scale_b;
  return a.dim == 2 && b.dim == 2 && a.sizes[0] == x.a.sizes[0] && a.sizes[1] == 1 &&
         b.sizes[0] == 1 && b.sizes[1] == x.b.sizes[1] && a.strides[0] == 1 && b.strides[1] == 1;
}

// The reason why PyTorch alone takes the operands, or no one.
const char* why_not_operands(const Call& x) {
  if (x.a.dim != 2 || x.b.dim != 2 || x.a.sizes[1] != x.b.sizes[0]) {
    return "shapes that it does not take";
  }
  if (x.a.strides[1] != 1 || x.b.strides[0] != 1) return "operands that are not contiguous along K";
  if (x.a.sizes[1] % kScaledMultiple != 0 || x.b.sizes[1] % kScaledMultiple != 0 ||
      numel(x.a) == 0 || numel(x.b) == 0) {
    return "sizes that are no multiples of 16";
  }
  if (x.b.dtype != ScalarType::Float8_e4m3fn && x.b.dtype != ScalarType::Float8_e5m2) {
    return "different dtypes";
  }
  for (const TensorView* other : {&x.b, &x.scale_a, &x.scale_b}) {
    if (!same_device(*other, x.a)) return "tensors on different devices";
  }
  return nullptr;
}

const char* why_not_result(const Call& x) {
  if (x.scale_result) return "a scale of the result";
  if (!x.out_dtype || (*x.out_dtype != ScalarType::BFloat16 && *x.out_dtype != ScalarType::Half)) {
    return "an out_dtype that is not bfloat16 or float16";
  }
  if (!x.bias) return nullptr;
  const TensorView& bias = *x.bias;
  const bool fits = bias.dim == 1 && bias.sizes[0] == x.b.sizes[1] && bias.dtype == *x.out_dtype &&
                    same_device(bias, x.a);
  return fits ? nullptr : "a bias that it does not take";
}

const char* why_not_scales(const Call& x) {
  if (x.scale_a.dtype != ScalarType::Float || x.scale_b.dtype != ScalarType::Float) {
    return "scales that are not float32";
  }
  const bool both_e4m3 =
      x.a.dtype == ScalarType::Float8_e4m3fn && x.b.dtype == ScalarType::Float8_e4m3fn;
  if (of_tensors(x)) {
    const bool both_e5m2 =
        x.a.dtype == ScalarType::Float8_e5m2 && x.b.dtype == ScalarType::Float8_e5m2;
    return both_e5m2 ? "two operands of float8_e5m2" : nullptr;
  }
  if (!is_by_rows(x)) return "scales that are neither of tensors nor of rows";
  const bool fits = both_e4m3 && *x.out_dtype == ScalarType::BFloat16;
  return fits ? nullptr : "dtypes that it does not take with scales of rows";
}

const char* why_not_scaled(const Call& x, Policy policy) {
  if (const char* reason = why_not_operands(x)) return reason;
  if (const char* reason = why_not_result(x)) return reason;
  if (const char* reason = why_not_scales(x)) return reason;
  if (x.a.on_cuda() && device(x.a.device_index).sm != kScaledSm) {
    return "no kernels of 8-bit floats for this GPU";
  }
  if (policy == Policy::kFastest) {
    if (of_tensors(x)) return "scales of tensors, which are not known to be quicker";
    if (!x.fast) return "use_fast_accum=False, which is not known to be quicker";
  }
  return why_not_tensor(x.a, CallKind::kScaled, policy);
}

}  // namespace

Tensor aten_scaled_mm(const Tensor& self, const Tensor& mat2, const Tensor& scale_a,
                      const Tensor& scale_b, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& scale_result,
                      std::optional<ScalarType> out_dtype, bool use_fast_accum) {
  static const AtenOp op("aten::_scaled_mm", CallKind::kScaled);
  const Call call{TensorView(self), TensorView(mat2),      TensorView(scale_a), TensorView(scale_b),
                  view_of(bias),    view_of(scale_result), out_dtype,           use_fast_accum};
  const Policy policy = serving_policy();
  if (policy != Policy::kOff) {
    const char* const reason = why_not_scaled(call, policy);
    if (reason == nullptr) {
      const ServedCall served;
      const ScaleRecipe recipe = of_tensors(call) ? kScaleTensor : kScaleRow;
      const auto& run = call.a.on_cuda() ? scaled_matmul_cuda : scaled_matmul_cpu;
      Tensor result =
          run(self, mat2, scale_a, recipe, scale_b, recipe, bias, out_dtype, use_fast_accum);
      op.count_served(call.a);
      return result;
    }
    count_declined(op.name, reason);
  }
  AtenTensorHandle of_bias = bias ? bias->get() : nullptr;
  AtenTensorHandle of_result = scale_result ? scale_result->get() : nullptr;
  auto dtype = static_cast<int32_t>(out_dtype.value_or(ScalarType::BFloat16));
  AtenTensorHandle made = nullptr;
  check_aten(aten_products(call.a.on_cuda())
                 .scaled_mm(self.get(), mat2.get(), scale_a.get(), scale_b.get(),
                            bias ? &of_bias : nullptr, scale_result ? &of_result : nullptr,
                            out_dtype ? &dtype : nullptr, use_fast_accum, &made),
             op.name);
  return Tensor(made);
}

}  // namespace torch_cubin
