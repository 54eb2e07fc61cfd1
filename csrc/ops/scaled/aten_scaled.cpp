#include "ops/scaled/aten_scaled.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "ops/common/serving.h"
#include "ops/common/shape.h"
#include "ops/grouped/grouped.h"
#include "ops/scaled/scaled.h"
#include "pytorch/aten_kernels.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

// Of scales that say by their shapes what they are, as those of aten::_scaled_mm do.
constexpr int64_t kByShape = -1;

struct Call {
  Tensor scales_a, scales_b;  // as scaled_matmul takes them
  TensorView a, b, scale_a, scale_b;
  int64_t recipe_a, recipe_b;
  std::optional<TensorView> bias, scale_result;
  ScalarType out_dtype;
  bool fast;
};

Call call_of(const Tensor& self, const Tensor& mat2, const Tensor& scale_a, int64_t recipe_a,
             const Tensor& scale_b, int64_t recipe_b, const std::optional<Tensor>& bias,
             std::optional<ScalarType> out_dtype, bool use_fast_accum) {
  const TensorView a(self);
  return {scale_a,
          scale_b,
          a,
          TensorView(mat2),
          TensorView(scale_a),
          TensorView(scale_b),
          recipe_a,
          recipe_b,
          view_of(bias),
          std::nullopt,
          out_dtype.value_or(a.dtype),
          use_fast_accum};
}

int64_t numel(const TensorView& x) {
  return std::accumulate(x.sizes, x.sizes + x.dim, int64_t{1}, std::multiplies<>());
}

bool is_matrix(const TensorView& x, int64_t rows, int64_t columns) {
  return x.dim == 2 && x.sizes[0] == rows && x.sizes[1] == columns;
}

// The recipes of aten::_scaled_mm, which has none, by the shapes of its scales, as PyTorch finds
// them; scales of blocks become those of scaled_matmul.
void find_recipes(Call& x) {
  const TensorView &a = x.scale_a, &b = x.scale_b;
  const int64_t m = x.a.sizes[0], k = x.a.sizes[1], n = x.b.sizes[1];
  const int64_t blocks = ceil_div(k, kScaleBlock);
  if (numel(a) == 1 && numel(b) == 1) {
    x.recipe_a = x.recipe_b = kScaleTensor;
  } else if (is_matrix(a, m, 1) && is_matrix(b, 1, n)) {
    x.recipe_a = x.recipe_b = kScaleRow;
  } else {
    const bool rows = is_matrix(a, m, blocks), columns = is_matrix(b, blocks, n);
    if (!rows && !is_matrix(a, ceil_div(m, kScaleBlock), blocks)) return;
    if (!columns && !is_matrix(b, blocks, ceil_div(n, kScaleBlock))) return;
    x.recipe_a = rows ? kScaleBlock1x128 : kScaleBlock128x128;
    x.recipe_b = columns ? kScaleBlock1x128 : kScaleBlock128x128;
    if (!rows) x.scales_a = matrices_transposed(x.scales_a);
    if (columns) x.scales_b = matrices_transposed(x.scales_b);
    x.scale_a = TensorView(x.scales_a);
    x.scale_b = TensorView(x.scales_b);
  }
}

bool of_tensors(const Call& x) { return x.recipe_a == kScaleTensor && x.recipe_b == kScaleTensor; }

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
  const ScalarType dtype = x.out_dtype;
  if (dtype != ScalarType::BFloat16 && dtype != ScalarType::Half && dtype != ScalarType::Float &&
      dtype != ScalarType::Float8_e4m3fn) {
    return "an out_dtype that it does not take";
  }
  if (!x.bias) return nullptr;
  const TensorView& bias = *x.bias;
  const bool is_16_bit = bias.dtype == ScalarType::BFloat16 || bias.dtype == ScalarType::Half;
  const bool fits = bias.dim == 1 && bias.sizes[0] == x.b.sizes[1] && same_device(bias, x.a) &&
                    (is_16_bit ? bias.dtype == dtype || element_size(dtype) != 2
                               : bias.dtype == ScalarType::Float && bias.dtype == dtype);
  return fits ? nullptr : "a bias that it does not take";
}

const char* why_not_scales(const Call& x) {
  if (x.scale_a.dtype != ScalarType::Float || x.scale_b.dtype != ScalarType::Float) {
    return "scales that are not float32";
  }
  const int64_t k = x.a.sizes[1];
  if (is_block(x.recipe_a) != is_block(x.recipe_b) ||
      !scale_fits(x.scale_a, x.recipe_a, x.a.sizes[0], k) ||
      !scale_fits(x.scale_b, x.recipe_b, x.b.sizes[1], k)) {
    return "scales that it does not take";
  }
  const bool both_e4m3 =
      x.a.dtype == ScalarType::Float8_e4m3fn && x.b.dtype == ScalarType::Float8_e4m3fn;
  if (of_tensors(x)) {
    const bool both_e5m2 =
        x.a.dtype == ScalarType::Float8_e5m2 && x.b.dtype == ScalarType::Float8_e5m2;
    return both_e5m2 ? "two operands of float8_e5m2" : nullptr;
  }
  const bool fits = both_e4m3 && x.out_dtype != ScalarType::Float8_e4m3fn;
  return fits ? nullptr : "dtypes that it does not take with scales of rows or blocks";
}

const char* why_not_known(const Call& x) {
  if (of_tensors(x)) return "scales of tensors, which are not known to be quicker";
  if (is_block(x.recipe_a)) return "scales of blocks, which are not known to be quicker";
  if (!x.fast) return "use_fast_accum=False, which is not known to be quicker";
  if (x.out_dtype != ScalarType::BFloat16) return "an out_dtype that is not known to be quicker";
  return nullptr;
}

const char* why_not_scaled(Call& x, Policy policy) {
  if (const char* reason = why_not_operands(x)) return reason;
  if (x.recipe_a == kByShape) find_recipes(x);
  if (const char* reason = why_not_result(x)) return reason;
  if (const char* reason = why_not_scales(x)) return reason;
  if (x.a.on_cuda() && device(x.a.device_index).sm != kScaledSm) {
    return "no kernels of 8-bit floats for this GPU";
  }
  const char* const reason = policy == Policy::kFastest ? why_not_known(x) : nullptr;
  return reason ? reason : why_not_tensor(x.a, CallKind::kScaled, policy);
}

// The product, or nothing if the call is left to PyTorch, which is counted.
std::optional<Tensor> serve(const AtenOp& op, const Tensor& self, const Tensor& mat2, Call& x,
                            const std::optional<Tensor>& bias) {
  const Policy policy = serving_policy();
  if (policy == Policy::kOff) return std::nullopt;
  if (const char* reason = why_not_scaled(x, policy)) {
    count_declined(op.name, reason);
    return std::nullopt;
  }
  const ServedCall served;
  const auto& run = x.a.on_cuda() ? scaled_matmul_cuda : scaled_matmul_cpu;
  Tensor result =
      run(self, mat2, x.scales_a, x.recipe_a, x.scales_b, x.recipe_b, bias, x.out_dtype, x.fast);
  op.count_served(x.a);
  return result;
}

}  // namespace

Tensor aten_scaled_mm(const Tensor& self, const Tensor& mat2, const Tensor& scale_a,
                      const Tensor& scale_b, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& scale_result,
                      std::optional<ScalarType> out_dtype, bool use_fast_accum) {
  static const AtenOp op("aten::_scaled_mm", CallKind::kScaled);
  Call call =
      call_of(self, mat2, scale_a, kByShape, scale_b, kByShape, bias, out_dtype, use_fast_accum);
  call.scale_result = view_of(scale_result);
  if (std::optional<Tensor> result = serve(op, self, mat2, call, bias)) return *result;
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

const char* why_not_lists(const ScaleLists& lists) {
  if (lists.scales_a.size() != 1 || lists.scales_b.size() != 1 || lists.recipes_a.size() != 1 ||
      lists.recipes_b.size() != 1) {
    return "several scales of an operand";
  }
  const auto is_set = [](int64_t swizzle) { return swizzle != 0; };
  for (const auto* swizzles : {&lists.swizzles_a, &lists.swizzles_b}) {
    if (std::any_of(swizzles->begin(), swizzles->end(), is_set)) return "swizzled scales";
  }
  return lists.contraction_dim.empty() ? nullptr : "argument contraction_dim";
}

std::vector<Tensor> aten_scaled_mm_v2(
    const Tensor& self, const Tensor& mat2, const std::vector<Tensor>& scales_a,
    const std::vector<int64_t>& recipes_a, const std::vector<int64_t>& swizzles_a,
    const std::vector<Tensor>& scales_b, const std::vector<int64_t>& recipes_b,
    const std::vector<int64_t>& swizzles_b, const std::optional<Tensor>& bias,
    std::optional<ScalarType> out_dtype, const std::vector<int64_t>& contraction_dim,
    bool use_fast_accum) {
  static const AtenOp op("aten::_scaled_mm_v2", CallKind::kScaled);
  if (serving_policy() == Policy::kOff) return {};
  if (const char* reason = why_not_lists(
          {scales_a, scales_b, recipes_a, recipes_b, swizzles_a, swizzles_b, contraction_dim})) {
    count_declined(op.name, reason);
    return {};
  }
  Call call = call_of(self, mat2, scales_a[0], recipes_a[0], scales_b[0], recipes_b[0], bias,
                      out_dtype, use_fast_accum);
  const std::optional<Tensor> result = serve(op, self, mat2, call, bias);
  return result ? std::vector<Tensor>{*result} : std::vector<Tensor>{};
}

}  // namespace torch_cubin
