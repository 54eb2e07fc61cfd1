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

constexpr const char* kOp = "cross_entropy";

float* floats_of(const Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }

// Of an argument, which a kernel only reads. Throws [input] if it has no memory.
float* saved_of(const Tensor& tensor) {
  return const_cast<float*>(static_cast<const float*>(TensorView(tensor).data()));
}

// The parameter of a kernel, and the tensors that it refers to.
class Call {
 public:
  Call(const Tensor& target, const OptionalTensor& weight, const LossOptions& options)
      : targets_(torch::stable::contiguous(detach(target))) {
    const RowSizes classes{1, options.classes};
    check_length(kOp, classes);
    p.classes = static_cast<int>(options.classes);
    p.first = static_cast<int>(options.first_class);
    p.targets = static_cast<const tc_int64*>(TensorView(targets_).data());
    p.ignore_index = options.ignore_index;
    p.label_smoothing = static_cast<float>(options.label_smoothing);
    if (!weight) return;
    p.weight = weights_.emplace(*weight, 1, classes).data;
    p.weight_dtype = row_dtype(kOp, TensorView(*weight).dtype);
    if (options.label_smoothing == 0) return;
    weight_sum_ = row_sums_cuda(detach(*weight), kRowSum, 1, ScalarType::Float);
    p.weight_sum = floats_of(*weight_sum_);
  }

  void read_logits(const Tensor& input, const TensorView& x, const RowSizes& sizes) {
    p.x = logits_.emplace(input, 1, sizes).data;
    p.x_stride = logits_->stride;
    p.x_dtype = row_dtype(kOp, x.dtype);
  }

  LossesParams p{};

 private:
  Tensor targets_;
  std::optional<RowsOperand> weights_, logits_;
  OptionalTensor weight_sum_;
};

}  // namespace

ReducedLosses reduce_losses_cuda(const OptionalTensor& losses, const Tensor& target,
                                 const OptionalTensor& weight, const LossOptions& options,
                                 ScalarType statistics, ScalarType dtype) {
  const TensorView view(target);
  const auto number = [&](ScalarType dtype) {
    return empty_cuda(view.sizes, 0, dtype, view.device_index);
  };
  const ReducedLosses result{losses ? number(dtype) : no_elements(view, dtype), number(statistics)};
  const RowSizes rows{1, target.numel()};
  check_length(kOp, rows);
  Call call(target, weight, options);
  call.p.mean = options.is_mean();
  call.p.total = floats_of(result.total);
  if (losses) {
    call.p.losses = losses->mutable_data_ptr();
    call.p.out = result.loss.mutable_data_ptr();
    call.p.out_dtype = row_dtype(kOp, dtype);
  }
  launch_rows(kLossesSum, call.p, device(view.device_index), rows, ScalarType::Float);
  return result;
}

Losses cross_entropy_cuda(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                          const std::string& reduction, int64_t ignore_index,
                          double label_smoothing, ScalarType dtype) {
  const TensorView x(input), of_rows(target);
  const LossOptions options = loss_options(x, reduction, ignore_index, label_smoothing);
  const RowSizes sizes = check_cross_entropy(x, of_rows, view_of(weight), options);
  row_dtype(kOp, x.dtype);
  const auto empty = [&](ScalarType dtype) {
    return empty_cuda(of_rows.sizes, of_rows.dim, dtype, x.device_index);
  };
  const Tensor losses = empty(options.of_rows() ? dtype : ScalarType::Float);
  const Tensor max = empty(ScalarType::Float), log_sum = empty(ScalarType::Float);
  if (sizes.rows > 0) {
    Call call(target, weight, options);
    call.read_logits(input, x, sizes);
    call.p.losses = losses.mutable_data_ptr();
    call.p.losses_dtype = row_dtype(kOp, TensorView(losses).dtype);
    call.p.max = floats_of(max);
    call.p.log_sum = floats_of(log_sum);
    const Device& gpu = device(x.device_index);
    const RowsKind kind = label_smoothing != 0 || !has_vectors(sizes) ? kLossesGeneral
                          : has_few_losses(sizes, x.dtype, gpu)       ? kLossesFew
                                                                      : kLosses;
    launch_rows(kind, call.p, gpu, sizes, x.dtype);
  }
  if (options.of_rows()) return {losses, no_elements(x, ScalarType::Float), max, log_sum};
  const auto [loss, total] =
      reduce_losses_cuda(losses, target, weight, options, ScalarType::Float, dtype);
  return {loss, total, max, log_sum};
}

void cross_entropy_backward_into_cuda(const Tensor& out, const Tensor& grad, const Tensor& input,
                                      const Tensor& target, const OptionalTensor& weight,
                                      const Tensor& total, const Tensor& max, const Tensor& log_sum,
                                      const LossOptions& options) {
  const TensorView x(input);
  const RowSizes sizes = check_cross_entropy_backward(
      TensorView(grad), x, TensorView(target), view_of(weight), TensorView(total), TensorView(max),
      TensorView(log_sum), options);
  if (sizes.rows == 0 || sizes.columns == 0) return;
  const Tensor grads = torch::stable::contiguous(detach(grad));
  const Tensor maxima = torch::stable::contiguous(detach(max));
  const Tensor log_sums = torch::stable::contiguous(detach(log_sum));
  Call call(target, weight, options);
  call.read_logits(input, x, sizes);
  call.p.out = out.mutable_data_ptr();
  call.p.grad = TensorView(grads).data();
  call.p.losses_dtype = row_dtype(kOp, TensorView(grad).dtype);
  call.p.each_grad = options.of_rows();
  if (options.is_mean()) call.p.total = saved_of(total);
  call.p.max = saved_of(maxima);
  call.p.log_sum = saved_of(log_sums);
  launch_rows(kLossesBackward, call.p, device(x.device_index), sizes, x.dtype);
}

Tensor cross_entropy_backward_cuda(const Tensor& grad, const Tensor& input, const Tensor& target,
                                   const OptionalTensor& weight, const Tensor& total,
                                   const Tensor& max, const Tensor& log_sum,
                                   const std::string& reduction, int64_t ignore_index,
                                   double label_smoothing) {
  const TensorView x(input);
  row_dtype(kOp, x.dtype);
  const Tensor out = empty_cuda(x.sizes, x.dim, x.dtype, x.device_index);
  cross_entropy_backward_into_cuda(out, grad, input, target, weight, total, max, log_sum,
                                   loss_options(x, reduction, ignore_index, label_smoothing));
  return out;
}

}  // namespace torch_cubin
