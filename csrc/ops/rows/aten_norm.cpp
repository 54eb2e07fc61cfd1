#include "ops/rows/aten_norm.h"

#include <algorithm>

#include "ops/common/serving.h"
#include "ops/rows/kernels.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

// PyTorch's forward is as quick with fewer rows and fewer columns, its backward with fewer rows
// that take two launches of ours, or without the input's gradient, which is one kernel of its and
// two of ours; longer rows have not been measured (2026-11-28_h100_norms.json,
// 2026-11-30_h200_rows.json in benchmarks/results).
constexpr int64_t kFewNormRows = 128, kFewNormColumns = 1024, kMostNormColumns = 16384;
constexpr int64_t kFewBackwardRows = 4096;

// One call: the rows, the row's parameters, and their sizes if the shapes are valid.
struct Norm {
  Norm(const Tensor& input, const std::vector<int64_t>& shape, const OptionalTensor& weight,
       const OptionalTensor& bias)
      : x(input), dims(static_cast<int64_t>(shape.size())) {
    is_valid = dims > 0 && dims <= x.dim && std::equal(shape.begin(), shape.end(), row());
    if (is_valid) sizes = row_sizes(x, dims);
    for (const OptionalTensor* each : {&weight, &bias}) {
      if (*each && is_defined(**each)) check(TensorView(**each));
    }
  }

  void check(const TensorView& parameter) {
    const bool fits = parameter.dim == dims && same_device(parameter, x);
    is_valid = is_valid && fits && std::equal(row(), row() + dims, parameter.sizes);
    is_mixed |= parameter.dtype != x.dtype;
  }
  const int64_t* row() const { return x.sizes + x.dim - dims; }

  // A tensor of the input's shape or of its rows' statistics.
  bool is_like(const TensorView& other) const {
    return other.dtype == x.dtype && other.dim == x.dim && same_device(other, x) &&
           std::equal(x.sizes, x.sizes + x.dim, other.sizes);
  }
  bool are_statistics(const Tensor& tensor) const {
    if (!is_defined(tensor)) return false;
    const TensorView view(tensor);
    const Shape shape = statistics_shape(x, dims);
    return view.dtype == ScalarType::Float && same_device(view, x) && view.dim == shape.dim &&
           std::equal(view.sizes, view.sizes + view.dim, shape.sizes);
  }

  TensorView x;
  int64_t dims;
  RowSizes sizes;
  bool is_valid = false;
  bool is_mixed = false;  // parameters of another dtype than the input's
};

const char* why_not_known(const Norm& norm) {
  const RowSizes& sizes = norm.sizes;
  if (!has_vectors(sizes)) return "rows of no whole vectors, which are not known to be quicker";
  if (sizes.columns > kMostNormColumns) return "long rows, which have not been measured";
  if (sizes.rows < kFewNormRows && sizes.columns < kFewNormColumns) {
    return "few elements, which are not known to be quicker";
  }
  return RowsOperand::is_readable(norm.x, norm.dims, sizes)
             ? nullptr
             : "rows that are not contiguous and aligned";
}

const char* why_not_norm(const Norm& norm, Policy policy) {
  if (!norm.is_valid) return "shapes that it does not take";
  if (norm.sizes.rows == 0 || norm.sizes.columns == 0) return "no elements";
  if (norm.is_mixed) return "different dtypes";
  if (const char* reason = why_not_tensor(norm.x, CallKind::kNorm, policy)) return reason;
  if (!norm.x.on_cuda()) return nullptr;
  if (norm.x.dtype == ScalarType::Double) return "float64, which has no kernels";
  if (are_too_long(norm.sizes)) return "rows that are too long";
  return policy == Policy::kFastest ? why_not_known(norm) : nullptr;
}

const char* why_not_backward(const Norm& norm, const Tensor& grad_out, const Tensor& rstd,
                             const std::vector<bool>& mask, Policy policy) {
  if (const char* reason = why_not_norm(norm, policy)) return reason;
  if (!norm.x.on_cuda()) return nullptr;
  if (!is_defined(grad_out) || !norm.is_like(TensorView(grad_out)) || !norm.are_statistics(rstd)) {
    return "a gradient or statistics of another dtype or shape";
  }
  if (policy != Policy::kFastest) return nullptr;
  if (mask.empty() || !mask[0]) return "no gradient of the input, which is not known to be quicker";
  if (norm.sizes.rows >= kFewBackwardRows) return nullptr;
  const bool in_one_launch = norm.sizes.rows >= kFewNormRows &&
                             has_few_rows(norm.sizes, norm.x.dtype, device(norm.x.device_index));
  return in_one_launch ? nullptr : "few rows, which are not known to be quicker";
}

// Whether our kernels run: on the CPU the reference does, which is PyTorch's own kernel.
bool serves(const AtenOp& op, const Norm& norm, const char* reason) {
  if (reason != nullptr) {
    count_declined(op.name, reason);
    return false;
  }
  op.count_served(norm.x);
  return norm.x.on_cuda();
}

bool wants(const std::vector<bool>& mask, size_t index, const OptionalTensor& parameter) {
  return index < mask.size() && mask[index] && parameter && is_defined(*parameter);
}

OptionalTensor given(const OptionalTensor& tensor) {
  return tensor && is_defined(*tensor) ? tensor : std::nullopt;
}

// The gradients that were asked for, of input, weight and bias; the others are undefined.
ThreeTensors gradients(const Norm& norm, const Tensor& grad_out, const Tensor& input,
                       const Tensor* mean, const Tensor& rstd, const OptionalTensor& weight,
                       const OptionalTensor& bias, const std::vector<bool>& mask) {
  NormGradientsWanted wanted{!mask.empty() && mask[0], wants(mask, 1, weight), std::nullopt};
  if (wants(mask, 2, bias)) wanted.bias = norm.x.dtype;
  const auto [x, w, b] = differentiate_norm(grad_out, std::nullopt, input, mean, rstd,
                                            given(weight), norm.dims, wanted);
  const auto or_undefined = [](const OptionalTensor& found) {
    return found ? *found : undefined_tensor();
  };
  return {or_undefined(x), or_undefined(w), or_undefined(b)};
}

template <size_t kCount>
std::array<bool, kCount> flags(const std::vector<bool>& mask) {
  std::array<bool, kCount> found{};
  std::copy_n(mask.begin(), std::min(kCount, mask.size()), found.begin());
  return found;
}

}  // namespace

ThreeTensors aten_layer_norm(const Tensor& input, const std::vector<int64_t>& normalized_shape,
                             const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                             double eps) {
  static const AtenOp op("aten::native_layer_norm", CallKind::kNorm);
  const Policy policy = serving_policy();
  if (policy != Policy::kOff) {
    const Norm norm(input, normalized_shape, weight, bias);
    if (serves(op, norm, why_not_norm(norm, policy))) {
      const ServedCall served;
      const NormResults made = normalize(input, std::nullopt, normalized_shape, given(weight),
                                         given(bias), eps, /*centered=*/true);
      return {made.out, *made.mean, made.rstd};
    }
  }
  return aten_native_layer_norm(TensorView(input).on_cuda(), input, normalized_shape, weight, bias,
                                eps);
}

ThreeTensors aten_layer_norm_backward(const Tensor& grad_out, const Tensor& input,
                                      const std::vector<int64_t>& normalized_shape,
                                      const Tensor& mean, const Tensor& rstd,
                                      const std::optional<Tensor>& weight,
                                      const std::optional<Tensor>& bias,
                                      const std::vector<bool>& output_mask) {
  static const AtenOp op("aten::native_layer_norm_backward", CallKind::kNorm);
  const Policy policy = serving_policy();
  if (policy != Policy::kOff) {
    const Norm norm(input, normalized_shape, weight, bias);
    const char* reason = why_not_backward(norm, grad_out, rstd, output_mask, policy);
    if (reason == nullptr && norm.x.on_cuda() && !norm.are_statistics(mean)) {
      reason = "a gradient or statistics of another dtype or shape";
    }
    if (serves(op, norm, reason)) {
      const ServedCall served;
      return gradients(norm, grad_out, input, &mean, rstd, weight, bias, output_mask);
    }
  }
  return aten_native_layer_norm_backward(TensorView(input).on_cuda(), grad_out, input,
                                         normalized_shape, mean, rstd, weight, bias,
                                         flags<3>(output_mask));
}

TwoTensors aten_rms_norm(const Tensor& input, const std::vector<int64_t>& normalized_shape,
                         const std::optional<Tensor>& weight, std::optional<double> eps) {
  static const AtenOp op("aten::_fused_rms_norm", CallKind::kNorm);
  const Policy policy = serving_policy();
  if (policy != Policy::kOff) {
    const Norm norm(input, normalized_shape, weight, std::nullopt);
    if (serves(op, norm, why_not_norm(norm, policy))) {
      const ServedCall served;
      const NormResults made = normalize(input, std::nullopt, normalized_shape, given(weight),
                                         std::nullopt, eps, /*centered=*/false);
      return {made.out, made.rstd};
    }
  }
  return aten_fused_rms_norm(input, normalized_shape, weight, eps);
}

TwoTensors aten_rms_norm_backward(const Tensor& grad_out, const Tensor& input,
                                  const std::vector<int64_t>& normalized_shape, const Tensor& rstd,
                                  const std::optional<Tensor>& weight,
                                  const std::vector<bool>& output_mask) {
  static const AtenOp op("aten::_fused_rms_norm_backward", CallKind::kNorm);
  const Policy policy = serving_policy();
  if (policy != Policy::kOff) {
    const Norm norm(input, normalized_shape, weight, std::nullopt);
    if (serves(op, norm, why_not_backward(norm, grad_out, rstd, output_mask, policy))) {
      const ServedCall served;
      auto [x, w, b] = gradients(norm, grad_out, input, /*mean=*/nullptr, rstd, weight,
                                 std::nullopt, output_mask);
      return {x, w};
    }
  }
  return aten_fused_rms_norm_backward(grad_out, input, normalized_shape, rstd, weight,
                                      flags<2>(output_mask));
}

}  // namespace torch_cubin
