#include "ops/grouped/aten_grouped.h"

#include "ops/common/serving.h"
#include "ops/common/stable_ops.h"
#include "ops/grouped/grouped.h"
#include "ops/matmul/matmul.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

constexpr int kHopper = 90;

const AtenOp& grouped_op() {
  static const AtenOp op("aten::_grouped_mm", CallKind::kProduct);
  return op;
}

// Whether PyTorch takes the shapes, too.
bool fits(const TensorView& a, const TensorView& b, const std::optional<TensorView>& offs) {
  if (a.dim < 2 || a.dim > 3 || b.dim < 2 || b.dim > 3) return false;
  if (a.sizes[a.dim - 1] != b.sizes[b.dim - 2]) return false;
  if (a.dim == 3 && b.dim == 3) return !offs && a.sizes[0] == b.sizes[0];
  if (!offs || offs->dim != 1 || offs->dtype != ScalarType::Int) return false;
  return (a.dim == 2 && b.dim == 2) || offs->sizes[0] == (a.dim == 3 ? a : b).sizes[0];
}

const char* why_not_grouped(const TensorView& a, const TensorView& b,
                            const std::optional<TensorView>& offs, bool has_bias,
                            std::optional<ScalarType> out_dtype, Policy policy) {
  if (has_bias) return "a bias";
  if (a.dtype != b.dtype) return "different dtypes";
  if (out_dtype && *out_dtype != a.dtype) return "an out_dtype other than the operands'";
  if (!same_device(a, b) || (offs && !same_device(a, *offs))) return "tensors on different devices";
  if (!fits(a, b, offs)) return "shapes that it does not take";
  // PyTorch's results have gaps between their rows then.
  if (b.sizes[b.dim - 1] * element_size(a.dtype) % 16 != 0) {
    return "rows of results that are no multiples of 16 bytes";
  }
  if (a.on_cuda() && offs) {
    if (element_size(a.dtype) != 2) return "groups of a wide dtype";
    if (device(a.device_index).sm != kHopper) return "no kernels of groups for this GPU";
  }
  return why_not_tensor(a, CallKind::kProduct, policy);
}

Tensor grouped_product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& offs) {
  const TensorView left(a);
  if (!offs) return left.on_cuda() ? matmul_cuda(a, b) : matmul_cpu(a, b);
  const auto& run = left.on_cuda() ? grouped_product_cuda : grouped_product_cpu;
  if (left.dim == 2) return run(a, b, *offs, false, {});
  // The groups are columns.
  const Tensor columns = run(matrices_transposed(b), matrices_transposed(a), *offs, false, {});
  return torch::stable::contiguous(matrices_transposed(columns));
}

}  // namespace

std::vector<Tensor> aten_grouped_mm(const Tensor& self, const Tensor& mat2,
                                    const std::optional<Tensor>& offs,
                                    const std::optional<Tensor>& bias,
                                    std::optional<ScalarType> out_dtype) {
  const Policy policy = serving_policy();
  if (policy == Policy::kOff) return {};
  const TensorView a(self);
  const char* const reason =
      why_not_grouped(a, TensorView(mat2), view_of(offs), bias.has_value(), out_dtype, policy);
  if (reason != nullptr) {
    count_declined(grouped_op().name, reason);
    return {};
  }
  const ServedCall served;
  Tensor result = grouped_product(self, mat2, offs);
  grouped_op().count_served(a);
  return {result};
}

}  // namespace torch_cubin
