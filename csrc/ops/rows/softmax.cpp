// Softmax, log-softmax and their derivatives on CUDA, by csrc/kernels/rows/softmax*.cu.
#include "kernels/rows/softmax_params.h"
#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/rows/kernels.h"
#include "runtime/device.h"

namespace torch_cubin {
Tensor softmax_cuda(const Tensor& input, bool log, ScalarType dtype) {
  const char* op = log ? "log_softmax" : "softmax";
  const TensorView x(input);
  const RowSizes sizes = check_softmax(x, log, dtype);
  RowsSoftmaxParams p{};
  p.x_dtype = row_dtype(op, x.dtype);
  p.out_dtype = row_dtype(op, dtype);
  p.log = log;
  check_length(op, sizes);
  const Tensor out = empty_cuda(x.sizes, x.dim, dtype, x.device_index);
  if (sizes.rows == 0 || sizes.columns == 0) return out;
  const RowsOperand rows(input, x.dim > 0 ? 1 : 0, sizes);
  p.x = rows.data;
  p.x_stride = rows.stride;
  p.out = out.mutable_data_ptr();
  const Device& gpu = device(x.device_index);
  const RowsKind kind =
      has_held_rows(kRowsSoftmaxWarp, sizes, x.dtype, gpu)       ? kRowsSoftmaxWarp
      : has_held_rows(kRowsSoftmaxCluster, sizes, x.dtype, gpu)  ? kRowsSoftmaxCluster
      : has_staged_rows(kRowsSoftmaxStaged, sizes, x.dtype, gpu) ? kRowsSoftmaxStaged
                                                                 : kRowsSoftmax;
  launch_rows(kind, p, gpu, sizes, x.dtype);
  return out;
}

Tensor softmax_backward_cuda(const Tensor& grad_out, const Tensor& output, bool log,
                             ScalarType dtype) {
  constexpr const char* kOp = "_softmax_backward";
  const TensorView y(output);
  const RowSizes sizes = check_softmax_backward(TensorView(grad_out), y, log, dtype);
  RowsSoftmaxParams p{};
  p.x_dtype = row_dtype(kOp, y.dtype);
  p.out_dtype = row_dtype(kOp, dtype);
  p.log = log;
  check_length(kOp, sizes);
  const Tensor out = empty_cuda(y.sizes, y.dim, dtype, y.device_index);
  if (sizes.rows == 0 || sizes.columns == 0) return out;
  const int64_t dims = y.dim > 0 ? 1 : 0;
  const RowsOperand rows(output, dims, sizes), grad(grad_out, dims, sizes);
  p.x = rows.data;
  p.x_stride = rows.stride;
  p.grad_out = grad.data;
  p.grad_out_stride = grad.stride;
  p.out = out.mutable_data_ptr();
  const Device& gpu = device(y.device_index);
  const RowsKind kind =
      has_held_rows(kRowsSoftmaxBackwardWarp, sizes, y.dtype, gpu)    ? kRowsSoftmaxBackwardWarp
      : has_held_rows(kRowsSoftmaxBackwardBlock, sizes, y.dtype, gpu) ? kRowsSoftmaxBackwardBlock
      : has_staged_rows(kRowsSoftmaxBackwardStaged, sizes, y.dtype, gpu)
          ? kRowsSoftmaxBackwardStaged
          : kRowsSoftmaxBackward;
  launch_rows(kind, p, gpu, sizes, y.dtype, 2);
  return out;
}

}  // namespace torch_cubin
