// Cross entropy and its derivative on CUDA, by csrc/kernels/rows/losses*.cu.
#include <cmath>

#include "kernels/rows/losses_params.h"
#include "kernels/rows/sum_params.h"
#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/rows/kernels.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

float* floats_of(const Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }

// The arguments of both directions, as kernels read them.
struct Operands {
  Operands(const Tensor& input, const TensorView& x, const RowSizes& sizes, const Tensor& target,
           const OptionalTensor& weight, const LossOptions& options)
      : rows(input, 1, sizes), targets(torch::stable::contiguous(detach(target))) {
    check_length("cross_entropy", sizes);
    p.x = rows.data;
    p.x_stride = rows.stride;
    p.rows = sizes.rows;
    p.columns = static_cast<int>(sizes.columns);
    p.x_dtype = p.out_dtype = row_dtype("cross_entropy", x.dtype);
    p.targets = static_cast<const tc_int64*>(targets.const_data_ptr());
    p.ignore_index = options.ignore_index;
    p.label_smoothing = static_cast<float>(options.label_smoothing);
    if (!weight) return;
    p.weight = weights.emplace(*weight, 1, RowSizes{1, sizes.columns}).data;
    p.weight_dtype = row_dtype("cross_entropy", TensorView(*weight).dtype);
    if (options.label_smoothing == 0) return;
    weight_sum = row_sums_cuda(detach(*weight), kRowSum, 1, ScalarType::Float);
    p.weight_sum = floats_of(*weight_sum);
  }

  void run(RowsKind kind, const RowSizes& sizes, const TensorView& x) {
    const Device& gpu = device(x.device_index);
    const RowsLayout layout(kind, gpu, sizes, kind == kLossesSum ? ScalarType::Float : x.dtype);
    p.threads = static_cast<int>(layout.threads);
    p.cluster = static_cast<int>(layout.cluster);
    launch(*layout.kernel, layout.grid(), gpu, p);
  }

  LossesParams p{};

 private:
  RowsOperand rows;
  Tensor targets;
  std::optional<RowsOperand> weights;
  OptionalTensor weight_sum;
};

}  // namespace

Losses cross_entropy_cuda(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                          const std::string& reduction, int64_t ignore_index,
                          double label_smoothing, ScalarType dtype) {
  const LossOptions options{reduction, ignore_index, label_smoothing};
  const TensorView x(input), of_rows(target);
  const RowSizes sizes = check_cross_entropy(x, of_rows, view_of(weight), options);
  row_dtype("cross_entropy", x.dtype);
  const auto empty = [&](int64_t dim, ScalarType dtype) {
    return empty_cuda(of_rows.sizes, dim, dtype, x.device_index);
  };
  const Tensor loss = empty(options.of_rows() ? of_rows.dim : 0, dtype);
  const Tensor total =
      options.is_mean() ? empty(0, ScalarType::Float) : no_elements(x, ScalarType::Float);
  const Tensor max = empty(of_rows.dim, ScalarType::Float);
  const Tensor log_sum = empty(of_rows.dim, ScalarType::Float);
  const Losses result{loss, total, max, log_sum};
  if (sizes.rows == 0) {
    torch::stable::fill_(loss, options.is_mean() ? NAN : 0);
    torch::stable::fill_(total, 0);
    return result;
  }
  Operands own(input, x, sizes, target, weight, options);
  LossesParams& p = own.p;
  p.max = floats_of(max);
  p.log_sum = floats_of(log_sum);
  p.losses_dtype = row_dtype("cross_entropy", dtype);
  p.losses = loss.mutable_data_ptr();
  if (options.of_rows()) {
    own.run(kLosses, sizes, x);
    return result;
  }
  const RowSizes losses{1, sizes.rows};
  check_length("cross_entropy", losses);
  const Device& gpu = device(x.device_index);
  const Workspace of_rows_space(gpu, sizes.rows * 4), weights(gpu, sizes.rows * 4);
  p.out = loss.mutable_data_ptr();
  p.out_dtype = p.losses_dtype;
  p.losses = of_rows_space.data();
  p.losses_dtype = row_dtype("cross_entropy", ScalarType::Float);
  p.weights = reinterpret_cast<float*>(weights.data());
  own.run(kLosses, sizes, x);
  p.columns = static_cast<int>(sizes.rows);
  if (options.is_mean()) p.total = floats_of(total);
  own.run(kLossesSum, losses, x);
  return result;
}

void cross_entropy_backward_into(const Tensor& out, const Tensor& grad, const Tensor& input,
                                 const Tensor& target, const OptionalTensor& weight,
                                 const Tensor& total, const Tensor& max, const Tensor& log_sum,
                                 const LossOptions& options) {
  const TensorView x(input);
  const RowSizes sizes =
      check_cross_entropy_backward(TensorView(grad), x, TensorView(target), view_of(weight),
                                   TensorView(total), TensorView(max), TensorView(log_sum), options);
  if (sizes.rows == 0 || sizes.columns == 0) return;
  Operands own(input, x, sizes, target, weight, options);
  const Tensor grads = torch::stable::contiguous(detach(grad));
  const Tensor maxima = torch::stable::contiguous(detach(max));
  const Tensor log_sums = torch::stable::contiguous(detach(log_sum));
  LossesParams& p = own.p;
  p.out = out.mutable_data_ptr();
  p.grad = grads.const_data_ptr();
  p.losses_dtype = row_dtype("cross_entropy", TensorView(grad).dtype);
  p.each_grad = options.of_rows();
  if (options.is_mean()) p.total = floats_of(total);
  p.max = floats_of(maxima);
  p.log_sum = floats_of(log_sums);
  own.run(kLossesBackward, sizes, x);
}

Tensor cross_entropy_backward_cuda(const Tensor& grad, const Tensor& input, const Tensor& target,
                                   const OptionalTensor& weight, const Tensor& total,
                                   const Tensor& max, const Tensor& log_sum,
                                   const std::string& reduction, int64_t ignore_index,
                                   double label_smoothing) {
  const TensorView x(input);
  row_dtype("cross_entropy", x.dtype);
  const Tensor out = empty_cuda(x.sizes, x.dim, x.dtype, x.device_index);
  cross_entropy_backward_into(out, grad, input, target, weight, total, max, log_sum,
                              {reduction, ignore_index, label_smoothing});
  return out;
}

}  // namespace torch_cubin
