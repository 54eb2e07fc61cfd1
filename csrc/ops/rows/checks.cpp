// The checks of the ops over rows, the same on every device.
#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "kernels/rows/sum_params.h"
#include "ops/common/argument_checks.h"
#include "ops/rows/rows.h"
#include "pytorch/described_tensor.h"

namespace torch_cubin {
namespace {

std::string in_torch(const char* op) {
  return std::string("torch.nn.functional.") + (op[0] == 'a' ? "rms_norm" : op);
}

void check_shape(const char* op, const char* name, const TensorView& view, const int64_t* sizes,
                 int64_t dim, const char* like) {
  if (view.dim == dim && std::equal(sizes, sizes + dim, view.sizes)) return;
  fail({"input", argument_text(op, name), "has a wrong shape",
        tuple_text(sizes, dim) + ", that of '" + like + "'", view.shape_text(), ""});
}

// Of the input's dtype or float32, and of the shape of `like`.
void check_parameter(const char* op, const char* name, const std::optional<TensorView>& view,
                     const TensorView& input, const int64_t* sizes, int64_t dim,
                     const char* like = "normalized_shape") {
  if (!view) return;
  check_device(op, name, *view, "input", input);
  if (view->dtype != input.dtype && view->dtype != statistics_dtype(input.dtype)) {
    fail_dtype(op, name, dtype_name(input.dtype) + " like 'input', or float32", *view);
  }
  check_shape(op, name, *view, sizes, dim, like);
}

// What the op is given with logits of these rows on the device of `input`.
void check_targets(const char* op, const TensorView& input, const TensorView& target,
                   const std::optional<TensorView>& weight, const int64_t* sizes, int64_t dim,
                   const LossOptions& options) {
  check_side(op, "target", target, "input", input, ScalarType::Long);
  check_shape(op, "target", target, sizes, dim, "input's rows");
  check_parameter(op, "weight", weight, input, &options.classes, 1, "the classes");
  if (!options.of_rows() && !options.is_mean() && options.reduction != "sum") {
    fail({"input", argument_text(op, "reduction"), "is not known", "'mean', 'sum' or 'none'",
          printable(options.reduction), ""});
  }
  if (!(options.label_smoothing >= 0 && options.label_smoothing <= 1)) {
    fail({"input", argument_text(op, "label_smoothing"), "is out of range", "0 to 1",
          std::to_string(options.label_smoothing), ""});
  }
}

}  // namespace

const char* norm_name(bool centered, bool residual) {
  return centered ? "layer_norm" : residual ? "add_rms_norm" : "rms_norm";
}

double eps_of(std::optional<double> eps, ScalarType dtype) {
  if (eps) return *eps;
  return dtype == ScalarType::Double ? std::numeric_limits<double>::epsilon()
                                     : static_cast<double>(std::numeric_limits<float>::epsilon());
}

Shape statistics_shape(const TensorView& x, int64_t dims) {
  Shape shape;
  for (int64_t i = 0; i < x.dim; ++i) shape.append(i < x.dim - dims ? x.sizes[i] : 1);
  return shape;
}

Tensor no_elements(const TensorView& like, ScalarType dtype) {
  const int64_t none = 0;
  return empty_near(like, &none, 1, dtype);
}

RowSizes check_norm(const char* op, const TensorView& input,
                    const std::optional<TensorView>& residual,
                    const std::vector<int64_t>& normalized_shape,
                    const std::optional<TensorView>& weight,
                    const std::optional<TensorView>& bias) {
  check_float_dtype(op, "input", input, in_torch(op));
  const auto dims = static_cast<int64_t>(normalized_shape.size());
  const int64_t* normalized = normalized_shape.data();
  if (dims == 0 || dims > input.dim ||
      !std::equal(normalized, normalized + dims, input.sizes + input.dim - dims)) {
    fail({"input", argument_text(op, "normalized_shape"), "is not the end of the input's shape",
          "the last sizes of " + input.shape_text() + ", at least one",
          tuple_text(normalized, dims), ""});
  }
  if (residual) {
    check_like(op, "residual", *residual, "input", input);
    check_shape(op, "residual", *residual, input.sizes, input.dim, "input");
  }
  check_parameter(op, "weight", weight, input, normalized, dims);
  check_parameter(op, "bias", bias, input, normalized, dims);
  return row_sizes(input, dims);
}

RowSizes check_norm_backward(const TensorView& grad_out, const std::optional<TensorView>& grad_sum,
                             const TensorView& x, const TensorView& mean, const TensorView& rstd,
                             const std::optional<TensorView>& weight, int64_t dims, bool centered) {
  constexpr const char* kOp = "_norm_backward";
  check_float_dtype(kOp, "x", x, "torch.nn.functional.layer_norm");
  if (dims < 1 || dims > x.dim) {
    fail({"input", argument_text(kOp, "dims"), "is out of range",
          "1 to " + std::to_string(x.dim) + ", the dimensions of 'x'", std::to_string(dims), ""});
  }
  const auto check_rows = [&](const char* name, const TensorView& view) {
    check_like(kOp, name, view, "x", x);
    check_shape(kOp, name, view, x.sizes, x.dim, "x");
  };
  check_rows("grad_out", grad_out);
  if (grad_sum) check_rows("grad_sum", *grad_sum);
  const Shape statistics = statistics_shape(x, dims);
  const auto check_statistics = [&](const char* name, const TensorView& view) {
    check_side(kOp, name, view, "x", x, statistics_dtype(x.dtype));
    check_shape(kOp, name, view, statistics.sizes, statistics.dim, "x, the normalized sizes 1");
  };
  check_statistics("rstd", rstd);
  if (centered) check_statistics("mean", mean);
  check_parameter(kOp, "weight", weight, x, x.sizes + x.dim - dims, dims);
  return row_sizes(x, dims);
}

RowSizes check_softmax(const TensorView& input, bool log, ScalarType dtype) {
  const char* op = log ? "log_softmax" : "softmax";
  check_float_dtype(op, "input", input, in_torch(op));
  if (dtype != input.dtype && dtype != statistics_dtype(input.dtype)) {
    fail({"input", argument_text(op, "dtype"), "is not a result's",
          dtype_name(input.dtype) + " like 'input', or float32", dtype_name(dtype), ""});
  }
  return row_sizes(input, std::min<int64_t>(input.dim, 1));
}

RowSizes check_softmax_backward(const TensorView& grad_out, const TensorView& output, bool log,
                                ScalarType dtype) {
  constexpr const char* kOp = "_softmax_backward";
  check_float_dtype(kOp, "output", output, in_torch(log ? "log_softmax" : "softmax"));
  check_like(kOp, "grad_out", grad_out, "output", output);
  check_shape(kOp, "grad_out", grad_out, output.sizes, output.dim, "output");
  if (dtype != output.dtype && (output.dtype != ScalarType::Float || element_size(dtype) != 2)) {
    fail({"input", argument_text(kOp, "dtype"), "is not an input's",
          dtype_name(output.dtype) + " like 'output', or for float32 one of 16 bits",
          dtype_name(dtype), ""});
  }
  return row_sizes(output, std::min<int64_t>(output.dim, 1));
}

RowSizes check_row_sums(const TensorView& input, int64_t kind) {
  constexpr const char* kOp = "_row_sums";
  check_float_dtype(kOp, "input", input, "torch.sum");
  if (input.dim < 1) {
    fail({"input", argument_text(kOp, "input"), "has no rows", "at least 1 dimension",
          input.shape_text(), ""});
  }
  if (kind < 0 || kind >= kRowSumKinds) {
    fail({"input", argument_text(kOp, "kind"), "is not known",
          "0 to " + std::to_string(kRowSumKinds - 1), std::to_string(kind), ""});
  }
  return row_sizes(input, 1);
}

RowSizes check_cross_entropy(const TensorView& input, const TensorView& target,
                             const std::optional<TensorView>& weight, const LossOptions& options) {
  constexpr const char* kOp = "cross_entropy";
  check_float_dtype(kOp, "input", input, in_torch(kOp));
  if (input.dim < 1) {
    fail({"input", argument_text(kOp, "input"), "has no classes", "at least 1 dimension",
          input.shape_text(), ""});
  }
  check_targets(kOp, input, target, weight, input.sizes, input.dim - 1, options);
  return row_sizes(input, 1);
}

LossOptions loss_options(const TensorView& input, const std::string& reduction,
                         int64_t ignore_index, double label_smoothing) {
  const int64_t classes = input.dim > 0 ? input.sizes[input.dim - 1] : 0;
  return {reduction, ignore_index, label_smoothing, classes};
}

RowSizes check_linear_cross_entropy(const TensorView& input, const TensorView& linear_weight,
                                    const TensorView& target,
                                    const std::optional<TensorView>& linear_bias,
                                    const std::optional<TensorView>& weight, LossOptions options) {
  constexpr const char* kOp = "linear_cross_entropy";
  check_float_dtype(kOp, "input", input, in_torch(kOp));
  check_like(kOp, "linear_weight", linear_weight, "input", input);
  if (input.dim != 2 || linear_weight.dim != 2 || input.sizes[1] != linear_weight.sizes[1]) {
    fail({"input", argument_text(kOp, "linear_weight"), "does not match 'input'",
          "(classes, features) for an input of (rows, features)",
          linear_weight.shape_text() + " for an input of " + input.shape_text(), ""});
  }
  options.classes = linear_weight.sizes[0];
  if (linear_bias) {
    check_like(kOp, "linear_bias", *linear_bias, "input", input);
    check_shape(kOp, "linear_bias", *linear_bias, linear_weight.sizes, 1,
                "linear_weight's classes");
  }
  check_targets(kOp, input, target, weight, input.sizes, 1, options);
  return {input.sizes[0], linear_weight.sizes[0]};
}

RowSizes check_cross_entropy_backward(const TensorView& grad, const TensorView& input,
                                      const TensorView& target,
                                      const std::optional<TensorView>& weight,
                                      const TensorView& total, const TensorView& max,
                                      const TensorView& log_sum, const LossOptions& options) {
  constexpr const char* kOp = "_cross_entropy_backward";
  const RowSizes sizes = check_cross_entropy(input, target, weight, options);
  const ScalarType statistics = statistics_dtype(input.dtype);
  const auto check_rows = [&](const char* name, const TensorView& view) {
    check_side(kOp, name, view, "input", input, statistics);
    check_shape(kOp, name, view, target.sizes, target.dim, "target");
  };
  check_rows("max", max);
  check_rows("log_sum", log_sum);
  check_device(kOp, "grad", grad, "input", input);
  if (grad.dtype != input.dtype && grad.dtype != statistics) {
    fail_dtype(kOp, "grad", dtype_name(input.dtype) + " like 'input', or float32", grad);
  }
  check_shape(kOp, "grad", grad, target.sizes, options.of_rows() ? target.dim : 0, "the loss");
  if (options.is_mean()) {
    check_side(kOp, "total", total, "input", input, statistics);
    check_shape(kOp, "total", total, target.sizes, 0, "the loss");
  }
  return sizes;
}

void check_described_rows(const nlohmann::json& call) {
  const auto op = call.at("op").get<std::string>();
  const nlohmann::json& named = call.at("tensors");
  DescribedTensors tensors;
  const TensorView input = tensors.view(named.at("input"));
  if (call.contains("normalized_shape")) {
    check_norm(op.c_str(), input, tensors.find(named, "residual"),
               call.at("normalized_shape").get<std::vector<int64_t>>(),
               tensors.find(named, "weight"), tensors.find(named, "bias"));
    return;
  }
  if (call.contains("label_smoothing")) {
    const auto reduction = call.at("reduction").get<std::string>();
    const double smoothing = described_float(call.at("label_smoothing"));
    if (named.contains("linear_weight")) {
      const TensorView linear_weight = tensors.view(named.at("linear_weight"));
      check_linear_cross_entropy(input, linear_weight, tensors.view(named.at("target")),
                                 tensors.find(named, "linear_bias"), tensors.find(named, "weight"),
                                 {reduction, 0, smoothing, 0});
      return;
    }
    check_cross_entropy(input, tensors.view(named.at("target")), tensors.find(named, "weight"),
                        loss_options(input, reduction, 0, smoothing));
    return;
  }
  ScalarType dtype = input.dtype;
  find_dtype(call.at("dtype").get<std::string>(), &dtype);
  check_softmax(input, op == "log_softmax", dtype);
}

}  // namespace torch_cubin
