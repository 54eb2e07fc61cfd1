// The public ops over rows; ops/common/dispatch.h says what such ops may do. They read ranks and no
// sizes.
#include "cubin/error.h"
#include "ops/common/argument_checks.h"
#include "ops/common/dispatch.h"
#include "ops/common/stable_ops.h"
#include "ops/rows/rows.h"

namespace torch_cubin {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

Normed call_norm(const Tensor& input, const OptionalTensor& residual,
                 const std::vector<int64_t>& normalized_shape, const OptionalTensor& weight,
                 const OptionalTensor& bias, std::optional<double> eps, bool centered) {
  StableIValue stack[] = {from(input), from(residual), from(normalized_shape), from(weight),
                          from(bias),  from(eps),      from(centered)};
  call_by_grad_mode("cubin::_norm", "cubin::_norm_autograd", stack);
  return {to<Tensor>(stack[0]), to<Tensor>(stack[1]), to<Tensor>(stack[2]), to<Tensor>(stack[3])};
}

Tensor rms_norm(const Tensor& input, const std::vector<int64_t>& normalized_shape,
                const OptionalTensor& weight, std::optional<double> eps) {
  return std::get<0>(
      call_norm(input, std::nullopt, normalized_shape, weight, std::nullopt, eps, false));
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& input, const Tensor& residual,
                                        const std::vector<int64_t>& normalized_shape,
                                        const OptionalTensor& weight, std::optional<double> eps) {
  const Normed results =
      call_norm(input, residual, normalized_shape, weight, std::nullopt, eps, false);
  return {std::get<0>(results), std::get<1>(results)};
}

Tensor layer_norm(const Tensor& input, const std::vector<int64_t>& normalized_shape,
                  const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  return std::get<0>(call_norm(input, std::nullopt, normalized_shape, weight, bias, eps, true));
}

// The op itself converts to float32; other conversions come before it.
Tensor call_softmax(const Tensor& input, int64_t dim, std::optional<ScalarType> dtype, bool log) {
  const int64_t rank = input.dim(), last = rank > 0 ? rank - 1 : 0;
  if (dim < -last - 1 || dim > last) {
    fail({"input", argument_text(log ? "log_softmax" : "softmax", "dim"), "is out of range",
          std::to_string(-last - 1) + " to " + std::to_string(last), std::to_string(dim), ""});
  }
  if (dim < 0) dim += last + 1;
  const ScalarType own = input.scalar_type(), wanted = dtype.value_or(own);
  const bool widens =
      wanted == ScalarType::Float && (own == ScalarType::Half || own == ScalarType::BFloat16);
  Tensor rows = input;
  if (wanted != own && !widens) {
    rows = call_tensor_op("aten::to", "dtype", rows, wanted, false, false,
                          std::optional<torch::headeronly::MemoryFormat>());
  }
  if (dim != last) rows = call_tensor_op("aten::transpose", "int", rows, dim, last);
  const char* op = differentiable() ? "cubin::_softmax_autograd" : "cubin::_softmax";
  Tensor out = call_tensor_op(op, "", rows, log, wanted);
  if (dim == last) return out;
  out = call_tensor_op("aten::transpose", "int", out, dim, last);
  return call_tensor_op("aten::contiguous", "", out, torch::headeronly::MemoryFormat::Contiguous);
}

Tensor cross_entropy(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                     int64_t ignore_index, const std::string& reduction, double label_smoothing) {
  constexpr const char* kOp = "cross_entropy";
  if (input.dim() != 1 && input.dim() != 2) {
    fail({"input", argument_text(kOp, "input"), "has unsupported dimensions",
          "(classes,) or (rows, classes)", counted(input.dim(), "dimension"),
          "Reshape it to rows of classes."});
  }
  StableIValue stack[] = {from(input),
                          from(target),
                          from(weight),
                          from(reduction),
                          from(ignore_index),
                          from(label_smoothing),
                          from(input.scalar_type())};
  call_by_grad_mode("cubin::_cross_entropy", "cubin::_cross_entropy_autograd", stack);
  Tensor loss = to<Tensor>(stack[0]);
  for (int i = 1; i < 4; ++i) to<Tensor>(stack[i]);  // frees it
  return loss;
}

// A single row is a batch of one. The gradients may be computed with the losses where they can be
// asked for, the losses are one number, and its dtype has float32's exponents: float16 would lose
// those that are small before the gradient of the loss scales them.
Tensor linear_cross_entropy_of_rows(const Tensor& input, const Tensor& linear_weight,
                                    const Tensor& target, const OptionalTensor& linear_bias,
                                    const OptionalTensor& weight, const std::string& reduction,
                                    int64_t ignore_index, double label_smoothing,
                                    std::optional<ScalarType> dtype, bool recompute) {
  const bool is_row = input.dim() == 1;
  const auto batched = [&](const Tensor& tensor) {
    return is_row ? call_tensor_op("aten::unsqueeze", "", tensor, int64_t{0}) : tensor;
  };
  const bool at_once = differentiable() && !recompute && reduction != "none" &&
                       input.scalar_type() != ScalarType::Half;
  const ScalarType of_loss = dtype.value_or(input.scalar_type());
  StableIValue stack[] = {from(batched(input)), from(linear_weight),   from(batched(target)),
                          from(linear_bias),    from(weight),          from(reduction),
                          from(ignore_index),   from(label_smoothing), from(of_loss),
                          from(at_once),        from(at_once),         from(at_once)};
  call_by_grad_mode("cubin::_linear_cross_entropy", "cubin::_linear_cross_entropy_autograd", stack);
  Tensor loss = to<Tensor>(stack[0]);
  for (int i = 1; i < 7; ++i) to<Tensor>(stack[i]);  // frees it
  return is_row && reduction == "none" ? call_tensor_op("aten::squeeze", "dim", loss, int64_t{0})
                                       : loss;
}

Tensor softmax(const Tensor& input, int64_t dim, std::optional<ScalarType> dtype) {
  return call_softmax(input, dim, dtype, false);
}

Tensor log_softmax(const Tensor& input, int64_t dim, std::optional<ScalarType> dtype) {
  return call_softmax(input, dim, dtype, true);
}

}  // namespace

void rms_norm_composite(StableIValue* stack, uint64_t arguments, uint64_t results) {
  call_with_tensors("rms_norm", {"input"}, stack,
                    [=] { TORCH_BOX (&rms_norm)(stack, arguments, results); });
}

void add_rms_norm_composite(StableIValue* stack, uint64_t arguments, uint64_t results) {
  call_with_tensors("add_rms_norm", {"input", "residual"}, stack,
                    [=] { TORCH_BOX (&add_rms_norm)(stack, arguments, results); });
}

void layer_norm_composite(StableIValue* stack, uint64_t arguments, uint64_t results) {
  call_with_tensors("layer_norm", {"input"}, stack,
                    [=] { TORCH_BOX (&layer_norm)(stack, arguments, results); });
}

void softmax_composite(StableIValue* stack, uint64_t arguments, uint64_t results) {
  call_with_tensors("softmax", {"input"}, stack,
                    [=] { TORCH_BOX (&softmax)(stack, arguments, results); });
}

void log_softmax_composite(StableIValue* stack, uint64_t arguments, uint64_t results) {
  call_with_tensors("log_softmax", {"input"}, stack,
                    [=] { TORCH_BOX (&log_softmax)(stack, arguments, results); });
}

void linear_cross_entropy_composite(StableIValue* stack, uint64_t arguments, uint64_t results) {
  call_with_tensors("linear_cross_entropy", {"input", "linear_weight", "target"}, stack,
                    [=] { TORCH_BOX (&linear_cross_entropy_of_rows)(stack, arguments, results); });
}

void cross_entropy_composite(StableIValue* stack, uint64_t arguments, uint64_t results) {
  call_with_tensors("cross_entropy", {"input", "target"}, stack,
                    [=] { TORCH_BOX (&cross_entropy)(stack, arguments, results); });
}

}  // namespace torch_cubin
