// grouped_matmul on CUDA.
#include "ops/grouped/grouped.h"

#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/grouped/operands.h"
#include "runtime/device.h"

namespace torch_cubin {

Tensor grouped_matmul_cuda(const Tensor& mat_a, const Tensor& mat_b, const Tensor& offs,
                           bool zero_rest) {
  const TensorView x(mat_a), y(mat_b);
  const Shape shape = check_grouped(x, y, TensorView(offs));
  check_ends(kGroupedOp, offs, y.dim == 2 ? x.sizes[1] : x.sizes[0]);
  const int64_t groups = TensorView(offs).sizes[0];
  Tensor out = empty_cuda(shape.sizes, shape.dim, x.dtype, x.device_index);
  if (shape.numel() == 0) return out;
  if (x.sizes[1] == 0 || groups == 0) {
    if (groups > 0 || zero_rest) torch::stable::zero_(out);
    return out;
  }
  GroupedOperands operands(kGroupedOp, mat_a, mat_b, groups);
  GroupedCall& call = operands.call;
  call.zero_rest = zero_rest;
  call.out = static_cast<char*>(out.mutable_data_ptr());
  const Tensor ends = as_contiguous(offs);
  const TensorView e(ends);
  call.ends = e.data();
  call.wide_ends = e.dtype == ScalarType::Long;
  run_grouped(device(x.device_index), call);
  return out;
}

}  // namespace torch_cubin
