// Softmax, log-softmax, cross entropy and their derivatives on CUDA, by
// csrc/kernels/rows/softmax*.cu.
#include "kernels/rows/softmax_params.h"
#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/rows/kernels.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

void launch_softmax(RowsKind kind, RowsSoftmaxParams& p, const TensorView& x, const RowSizes& sizes,
                    void* out) {
  p.out = out;
  p.rows = sizes.rows;
  p.columns = static_cast<int>(sizes.columns);
  const Device& gpu = device(x.device_index);
  const RowsLayout layout(kind, gpu, sizes, x.dtype);
  p.threads = static_cast<int>(layout.threads);
  p.cluster = static_cast<int>(layout.cluster);
  launch(*layout.kernel, layout.grid(), gpu, p);
}

}  // namespace

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
  launch_softmax(kRowsSoftmax, p, x, sizes, out.mutable_data_ptr());
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
  launch_softmax(kRowsSoftmaxBackward, p, y, sizes, out.mutable_data_ptr());
  return out;
}

namespace {

// The parameter of cross entropy's two directions, without the results.
RowsSoftmaxParams loss_params(const TensorView& x, const RowSizes& sizes, const RowsOperand& rows,
                              const Tensor& targets, int64_t ignore_index, double label_smoothing) {
  RowsSoftmaxParams p{};
  p.x_dtype = p.out_dtype = row_dtype("cross_entropy", x.dtype);
  check_length("cross_entropy", sizes);
  p.x = rows.data;
  p.x_stride = rows.stride;
  p.targets = static_cast<const tc_int64*>(targets.const_data_ptr());
  p.ignore_index = ignore_index;
  p.label_smoothing = static_cast<float>(label_smoothing);
  return p;
}

float* floats_of(const Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }

}  // namespace

Losses cross_entropy_cuda(const Tensor& input, const Tensor& target, int64_t ignore_index,
                          double label_smoothing) {
  const TensorView x(input), of_rows(target);
  const RowSizes sizes = check_cross_entropy(x, of_rows, label_smoothing);
  row_dtype("cross_entropy", x.dtype);
  const auto empty = [&] {
    return empty_cuda(of_rows.sizes, of_rows.dim, ScalarType::Float, x.device_index);
  };
  const Tensor losses = empty(), counted = empty(), max = empty(), log_sum = empty();
  if (sizes.rows == 0) return {losses, counted, max, log_sum};
  const RowsOperand rows(input, 1, sizes);
  const Tensor targets = torch::stable::contiguous(detach(target));
  RowsSoftmaxParams p = loss_params(x, sizes, rows, targets, ignore_index, label_smoothing);
  p.losses = floats_of(losses);
  p.counted = floats_of(counted);
  p.max = floats_of(max);
  p.log_sum = floats_of(log_sum);
  launch_softmax(kRowsSoftmax, p, x, sizes, nullptr);
  return {losses, counted, max, log_sum};
}

Tensor cross_entropy_backward_cuda(const Tensor& grad_losses, const Tensor& input,
                                   const Tensor& target, const Tensor& max, const Tensor& log_sum,
                                   int64_t ignore_index, double label_smoothing) {
  const TensorView x(input);
  const RowSizes sizes =
      check_cross_entropy_backward(TensorView(grad_losses), x, TensorView(target), TensorView(max),
                                   TensorView(log_sum), label_smoothing);
  row_dtype("cross_entropy", x.dtype);
  const Tensor out = empty_cuda(x.sizes, x.dim, x.dtype, x.device_index);
  if (sizes.rows == 0 || sizes.columns == 0) return out;
  const RowsOperand rows(input, 1, sizes);
  const Tensor targets = torch::stable::contiguous(detach(target));
  const Tensor grads = torch::stable::contiguous(detach(grad_losses));
  const Tensor maxima = torch::stable::contiguous(detach(max));
  const Tensor log_sums = torch::stable::contiguous(detach(log_sum));
  RowsSoftmaxParams p = loss_params(x, sizes, rows, targets, ignore_index, label_smoothing);
  p.grad_losses = floats_of(grads);
  p.max = floats_of(maxima);
  p.log_sum = floats_of(log_sums);
  launch_softmax(kRowsSoftmax, p, x, sizes, out.mutable_data_ptr());
  return out;
}

}  // namespace torch_cubin
