#include "ops/attention/api/aten_results.h"

#include <algorithm>
#include <limits>

#include "ops/common/stable_ops.h"
#include "pytorch/aten_kernels.h"

namespace torch_cubin {

bool serves_attention(const AtenOp& op, const char* reason) {
  if (reason == nullptr) return true;
  count_declined(op.name, reason);
  return false;
}

Tensor with_strides(const Tensor& result, const int64_t* strides) {
  const TensorView view(result);
  bool same = true;
  for (int64_t i = 0; i < view.dim; ++i) {
    same = same && (view.sizes[i] == 1 || view.strides[i] == strides[i]);
  }
  if (same && std::equal(strides, strides + view.dim, view.strides)) return result;
  Tensor out = empty_near(view, view.sizes, view.dim, view.dtype, strides);
  return torch::stable::copy_(out, result);
}

Tensor laid_out_as(const Tensor& result, const Tensor& like) {
  const TensorView own(result), other(like);
  if (std::equal(own.strides, own.strides + own.dim, other.strides)) return result;
  const Tensor wanted = torch::stable::empty_like(like);
  return with_strides(result, TensorView(wanted).strides);
}

void mark_empty_rows(Tensor& logsumexp) {
  const double inf = std::numeric_limits<double>::infinity();
  StableIValue stack[] = {
      torch::stable::detail::from(logsumexp),
      torch::stable::detail::from(std::optional<double>(std::numeric_limits<double>::quiet_NaN())),
      torch::stable::detail::from(std::optional<double>(inf)),
      torch::stable::detail::from(std::optional<double>(inf))};
  check_aten(torch_call_dispatcher("aten::nan_to_num_", "", stack, TORCH_ABI_VERSION),
             "aten::nan_to_num_");
  torch::stable::detail::to<Tensor>(stack[0]);  // released
}

Tensor scalar(const TensorView& like, ScalarType dtype) {
  return empty_near(like, nullptr, 0, dtype);
}

Tensor vector(const TensorView& like, int64_t size, ScalarType dtype) {
  return empty_near(like, &size, 1, dtype);
}

}  // namespace torch_cubin
