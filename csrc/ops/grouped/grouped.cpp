// grouped_matmul on CUDA.
#include "ops/grouped/grouped.h"

#include <algorithm>

#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/grouped/operands.h"
#include "ops/matmul/checks.h"
#include "runtime/device.h"

namespace torch_cubin {

namespace {

// An operand that adds nothing, because no kernel takes products without K.
Tensor zeros_of_k(const TensorView& like, int64_t first, int64_t rest) {
  constexpr int64_t kK = 8;
  const int64_t sizes[] = {first, kK, rest};
  Tensor out = empty_cuda(sizes, rest < 0 ? 2 : 3, like.dtype, like.device_index);
  torch::stable::zero_(out);
  return out;
}

// The options as the kernel reads them; owns their copies.
struct OptionMemory {
  explicit OptionMemory(const GroupedOptions& options) {
    const auto own = [](const std::optional<Tensor>& tensor) {
      return tensor ? std::optional(as_contiguous(*tensor)) : std::nullopt;
    };
    bias = own(options.bias);
    scale = own(options.scale);
    rows = own(options.rows);
    out_rows = own(options.out_rows);
  }

  void set(GroupedCall& call) const {
    const auto data = [](const std::optional<Tensor>& tensor) {
      return tensor ? TensorView(*tensor).data() : nullptr;
    };
    call.bias = data(bias);
    call.scale = static_cast<const float*>(data(scale));
    call.rows = static_cast<const int*>(data(rows));
    call.out_rows = static_cast<const int*>(data(out_rows));
  }

  std::optional<Tensor> bias, scale, rows, out_rows;
};

}  // namespace

Tensor grouped_product_cuda(const Tensor& mat_a, const Tensor& mat_b, const Tensor& offs,
                            bool zero_rest, const GroupedOptions& options) {
  const TensorView x(mat_a), y(mat_b);
  const Shape shape = check_grouped(x, y, TensorView(offs), views_of(options));
  if (y.dim == 3)
    check_kernel_sizes(kGroupedOp, shape.sizes[0], y.sizes[2], y.sizes[1], y.sizes[0]);
  const bool has_options = options.any();
  if (has_options && !has_row_options(x.dtype)) {
    return grouped_by_steps(grouped_product_cuda, mat_a, mat_b, offs, options);
  }
  check_ends(kGroupedOp, offs, y.dim == 2 ? x.sizes[1] : shape.sizes[0]);
  const int64_t groups = TensorView(offs).sizes[0];
  Tensor out = empty_cuda(shape.sizes, shape.dim, x.dtype, x.device_index);
  if (shape.numel() == 0) return out;
  if (groups == 0) {
    if (zero_rest) torch::stable::zero_(out);
    return out;
  }
  std::optional<Tensor> a_zeros, b_zeros;
  if (x.sizes[1] == 0 || x.sizes[0] == 0) {
    a_zeros = zeros_of_k(x, std::max<int64_t>(1, x.sizes[0]), -1);
    b_zeros = y.dim == 3 ? zeros_of_k(y, groups, y.sizes[2])
                         : matrices_transposed(zeros_of_k(y, y.sizes[1], -1));
  }
  const Activation activation = check_activation(options.activation, kGroupedOp);
  const OptionMemory memory(options);
  GroupedOperands operands(kGroupedOp, a_zeros.value_or(mat_a), b_zeros.value_or(mat_b), groups,
                           false, {activation, false});
  GroupedCall& call = operands.call;
  call.without_k = x.sizes[1] == 0;
  memory.set(call);
  if (call.rows != nullptr) call.a_height = std::max<int64_t>(1, x.sizes[0]);
  if (y.dim == 3) {
    call.m = shape.sizes[0];
    call.n = shape.sizes[1];
  }
  call.zero_rest = zero_rest;
  call.out = static_cast<char*>(out.mutable_data_ptr());
  const Tensor ends = as_contiguous(offs);
  const TensorView e(ends);
  call.ends = e.data();
  call.wide_ends = e.dtype == ScalarType::Long;
  run_grouped(device(x.device_index), call);
  return out;
}

Tensor grouped_matmul_cuda(const Tensor& mat_a, const Tensor& mat_b, const Tensor& offs,
                           bool zero_rest, const std::optional<Tensor>& bias,
                           const std::optional<Tensor>& scale, const std::optional<Tensor>& rows,
                           const std::optional<Tensor>& out_rows, const std::string& activation) {
  return grouped_product_cuda(mat_a, mat_b, offs, zero_rest,
                              {bias, scale, rows, out_rows, activation});
}

}  // namespace torch_cubin
