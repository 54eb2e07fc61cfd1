// The ops over rows on the CPU: references that are easy to read, in float64 for every dtype.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "cubin/error.h"
#include "kernels/rows/sum_params.h"
#include "ops/common/argument_checks.h"
#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/common/values.h"
#include "ops/rows/rows.h"

// The newer versions of these need glibc 2.29 (tests/unit/test_abi.py) and differ only in errno.
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver exp,exp@GLIBC_2.2.5");
__asm__(".symver log,log@GLIBC_2.2.5");
#endif

namespace torch_cubin {
namespace {

std::optional<Values> values_of(const OptionalTensor& tensor) {
  return tensor ? std::optional<Values>(std::in_place, *tensor) : std::nullopt;
}

double sum_of(int64_t columns, const std::function<double(int64_t)>& term) {
  double sum = 0;
  for (int64_t j = 0; j < columns; ++j) sum += term(j);
  return sum;
}

}  // namespace

Normed norm_cpu(const Tensor& input, const OptionalTensor& residual,
                const std::vector<int64_t>& normalized_shape, const OptionalTensor& weight,
                const OptionalTensor& bias, std::optional<double> eps, bool centered) {
  const char* op = norm_name(centered, residual.has_value());
  const TensorView view(input);
  const auto [rows, columns] =
      check_norm(op, view, view_of(residual), normalized_shape, view_of(weight), view_of(bias));
  const ScalarType statistics = statistics_dtype(view.dtype);
  const Shape each = statistics_shape(view, static_cast<int64_t>(normalized_shape.size()));
  Values x(input), means(view, each.sizes, each.dim), rstds(view, each.sizes, each.dim);
  Values out(view, view.sizes, view.dim);
  Tensor sum = no_elements(view, view.dtype);
  if (residual) {
    Values other(*residual), total(view, view.sizes, view.dim);
    for (int64_t i = 0; i < rows * columns; ++i) total.data()[i] = x.data()[i] + other.data()[i];
    sum = total.rounded(view.dtype);
    x = Values(sum);
  }
  std::optional<Values> factor = values_of(weight), shift = values_of(bias);
  const double least = eps_of(eps, view.dtype), count = static_cast<double>(columns);
  for (int64_t row = 0; row < rows; ++row) {
    const double* own = x.row(row, columns);
    double mean = 0;
    if (centered) mean = sum_of(columns, [&](int64_t j) { return own[j]; }) / count;
    const double variance =
        sum_of(columns, [&](int64_t j) { return (own[j] - mean) * (own[j] - mean); }) / count;
    const double rstd = 1 / std::sqrt(variance + least);
    means.data()[row] = mean;
    rstds.data()[row] = rstd;
    for (int64_t j = 0; j < columns; ++j) {
      double y = (own[j] - mean) * rstd;
      if (factor) y *= factor->data()[j];
      if (shift) y += shift->data()[j];
      out.row(row, columns)[j] = y;
    }
  }
  return {out.rounded(view.dtype), sum,
          centered ? means.rounded(statistics) : no_elements(view, statistics),
          rstds.rounded(statistics)};
}

NormGradients norm_backward_cpu(const Tensor& grad_out, const OptionalTensor& grad_sum,
                                const Tensor& x_tensor, const Tensor& mean, const Tensor& rstd,
                                const OptionalTensor& weight, int64_t dims,
                                std::optional<double> /*eps*/, bool centered, bool needs_weight,
                                std::optional<ScalarType> bias_dtype) {
  const TensorView view(x_tensor);
  const auto [rows, columns] =
      check_norm_backward(TensorView(grad_out), view_of(grad_sum), view, TensorView(mean),
                          TensorView(rstd), view_of(weight), dims, centered);
  Values x(x_tensor), grad(grad_out), means(mean), rstds(rstd);
  Values out(view, view.sizes, view.dim);
  const int64_t* row_sizes = view.sizes + view.dim - dims;
  Values of_weight(view, row_sizes, dims), of_bias(view, row_sizes, dims);
  std::optional<Values> factor = values_of(weight), more = values_of(grad_sum);
  std::vector<double> x_hat(columns), weighed(columns);
  const double count = static_cast<double>(columns);
  for (int64_t row = 0; row < rows; ++row) {
    const double shift = centered ? means.data()[row] : 0, scale = rstds.data()[row];
    for (int64_t j = 0; j < columns; ++j) {
      x_hat[j] = (x.row(row, columns)[j] - shift) * scale;
      const double own = grad.row(row, columns)[j];
      weighed[j] = factor ? own * factor->data()[j] : own;
      of_weight.data()[j] += own * x_hat[j];
      of_bias.data()[j] += own;
    }
    const double of_x = sum_of(columns, [&](int64_t j) { return weighed[j] * x_hat[j]; }) / count;
    const double of_mean =
        centered ? sum_of(columns, [&](int64_t j) { return weighed[j]; }) / count : 0;
    for (int64_t j = 0; j < columns; ++j) {
      double& to = out.row(row, columns)[j];
      to = scale * (weighed[j] - x_hat[j] * of_x - of_mean);
      if (more) to += more->row(row, columns)[j];
    }
  }
  const ScalarType weight_dtype = weight ? TensorView(*weight).dtype : view.dtype;
  return {
      out.rounded(view.dtype),
      needs_weight && weight ? of_weight.rounded(weight_dtype) : no_elements(view, weight_dtype),
      bias_dtype ? of_bias.rounded(*bias_dtype) : no_elements(view, view.dtype)};
}

Tensor softmax_cpu(const Tensor& input, bool log, ScalarType dtype) {
  const TensorView view(input);
  const auto [rows, columns] = check_softmax(view, log, dtype);
  Values x(input), out(view, view.sizes, view.dim);
  for (int64_t row = 0; row < rows && columns > 0; ++row) {
    const double* own = x.row(row, columns);
    // NaN and infinities propagate: all of such a row is NaN, as is one of -inf alone.
    const double max = *std::max_element(own, own + columns);
    const double sum = sum_of(columns, [&](int64_t j) { return std::exp(own[j] - max); });
    for (int64_t j = 0; j < columns; ++j) {
      out.row(row, columns)[j] = log ? own[j] - max - std::log(sum) : std::exp(own[j] - max) / sum;
    }
  }
  return out.rounded(dtype);
}

Tensor softmax_backward_cpu(const Tensor& grad_out, const Tensor& output, bool log,
                            ScalarType dtype) {
  const TensorView view(output);
  const auto [rows, columns] = check_softmax_backward(TensorView(grad_out), view, log, dtype);
  Values grad(grad_out), y(output), out(view, view.sizes, view.dim);
  for (int64_t row = 0; row < rows; ++row) {
    const double *own = y.row(row, columns), *of_own = grad.row(row, columns);
    const double sum =
        sum_of(columns, [&](int64_t j) { return log ? of_own[j] : own[j] * of_own[j]; });
    for (int64_t j = 0; j < columns; ++j) {
      out.row(row, columns)[j] =
          log ? of_own[j] - std::exp(own[j]) * sum : own[j] * (of_own[j] - sum);
    }
  }
  return out.rounded(dtype);
}

Tensor row_sums_cpu(const Tensor& input, int64_t kind, double divisor, ScalarType dtype) {
  const TensorView view(input);
  const auto [rows, columns] = check_row_sums(view, kind);
  Values x(input), out(view, view.sizes, view.dim - 1);
  for (int64_t row = 0; row < rows; ++row) {
    const double* own = x.row(row, columns);
    double mean = 0;
    if (kind == kRowDeviations) {
      mean = sum_of(columns, [&](int64_t j) { return own[j]; }) / static_cast<double>(columns);
    }
    const double sum = sum_of(columns, [&](int64_t j) {
      return kind == kRowSum ? own[j] : (own[j] - mean) * (own[j] - mean);
    });
    out.data()[row] = sum / divisor;
  }
  return out.rounded(dtype);
}

namespace {

// The class of a row; -1 if it is ignored. Throws [input] for a target that is no class.
std::vector<int64_t> classes_of(const Tensor& target, int64_t ignore_index, int64_t columns) {
  const Tensor dense = torch::stable::contiguous(detach(target));
  const auto* own = static_cast<const int64_t*>(dense.const_data_ptr());
  std::vector<int64_t> out(own, own + dense.numel());
  for (int64_t& each : out) {
    if (each == ignore_index) {
      each = -1;
    } else if (each < 0 || each >= columns) {
      fail({"input", argument_text("cross_entropy", "target"), "has a value that is no class",
            "0 to " + std::to_string(columns - 1) + ", or ignore_index", std::to_string(each), ""});
    }
  }
  return out;
}

}  // namespace

ReducedLosses reduce_losses_cpu(const OptionalTensor& losses, const Tensor& target,
                                const OptionalTensor& weight, const LossOptions& options,
                                ScalarType statistics, ScalarType dtype) {
  const TensorView view(target);
  double sum = 0, total = 0;
  std::optional<Values> weights = values_of(weight), each = values_of(losses);
  const std::vector<int64_t> classes = classes_of(target, options.ignore_index, options.classes);
  for (size_t row = 0; row < classes.size(); ++row) {
    if (classes[row] < 0) continue;
    if (each) sum += each->data()[row];
    total += weights ? weights->data()[classes[row]] : 1;
  }
  const auto number = [&](double value, ScalarType dtype) {
    Values out(view, view.sizes, 0);
    out.data()[0] = value;
    return out.rounded(dtype);
  };
  return {losses ? number(options.is_mean() ? sum / total : sum, dtype) : no_elements(view, dtype),
          number(total, statistics)};
}

Losses cross_entropy_cpu(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                         const std::string& reduction, int64_t ignore_index, double label_smoothing,
                         ScalarType dtype) {
  const TensorView view(input), of_rows(target);
  const LossOptions options = loss_options(view, reduction, ignore_index, label_smoothing);
  const auto [rows, columns] = check_cross_entropy(view, of_rows, view_of(weight), options);
  const std::vector<int64_t> classes = classes_of(target, ignore_index, columns);
  const auto zeros = [&] { return Values(view, of_rows.sizes, of_rows.dim); };
  Values x(input), losses = zeros(), maxima = zeros(), log_sums = zeros();
  std::optional<Values> weights = values_of(weight);
  const auto weight_of = [&](int64_t j) { return weights ? weights->data()[j] : 1.0; };
  for (int64_t row = 0; row < rows; ++row) {
    if (classes[row] < 0) continue;
    const double* own = x.row(row, columns);
    const double max = *std::max_element(own, own + columns);
    const double log_sum =
        std::log(sum_of(columns, [&](int64_t j) { return std::exp(own[j] - max); }));
    maxima.data()[row] = max;
    log_sums.data()[row] = log_sum;
    double loss = weight_of(classes[row]) * (log_sum - (own[classes[row]] - max));
    if (label_smoothing != 0) {
      const double smooth =
          sum_of(columns, [&](int64_t j) { return weight_of(j) * (log_sum - (own[j] - max)); });
      loss = (1 - label_smoothing) * loss + label_smoothing / static_cast<double>(columns) * smooth;
    }
    losses.data()[row] = loss;
  }
  const ScalarType statistics = statistics_dtype(view.dtype);
  Tensor loss = losses.rounded(dtype), total = no_elements(view, statistics);
  if (!options.of_rows()) {
    const ReducedLosses reduced =
        reduce_losses_cpu(losses.rounded(statistics), target, weight, options, statistics, dtype);
    loss = reduced.loss;
    total = reduced.total;
  }
  return {loss, total, maxima.rounded(statistics), log_sums.rounded(statistics)};
}

Tensor cross_entropy_backward_cpu(const Tensor& grad, const Tensor& input, const Tensor& target,
                                  const OptionalTensor& weight, const Tensor& total,
                                  const Tensor& max, const Tensor& log_sum,
                                  const std::string& reduction, int64_t ignore_index,
                                  double label_smoothing) {
  const TensorView x(input);
  const Tensor out = empty_near(x, x.sizes, x.dim, x.dtype);
  cross_entropy_backward_into_cpu(out, grad, input, target, weight, total, max, log_sum,
                                  loss_options(x, reduction, ignore_index, label_smoothing));
  return out;
}

void cross_entropy_backward_into_cpu(const Tensor& out, const Tensor& grad, const Tensor& input,
                                     const Tensor& target, const OptionalTensor& weight,
                                     const Tensor& total, const Tensor& max, const Tensor& log_sum,
                                     const LossOptions& options) {
  const TensorView view(input);
  const auto [rows, columns] = check_cross_entropy_backward(
      TensorView(grad), view, TensorView(target), view_of(weight), TensorView(total),
      TensorView(max), TensorView(log_sum), options);
  const std::vector<int64_t> classes = classes_of(target, options.ignore_index, options.classes);
  Values x(input), grads(grad), maxima(max), log_sums(log_sum), divisor(total);
  std::optional<Values> weights = values_of(weight);
  const auto weight_of = [&](int64_t j) { return weights ? weights->data()[j] : 1.0; };
  const double all = sum_of(options.classes, weight_of);
  const double uniform = options.label_smoothing / static_cast<double>(options.classes);
  Values gradient(view, view.sizes, view.dim);
  for (int64_t row = 0; row < rows; ++row) {
    if (classes[row] < 0) continue;
    const double scale =
        grads.data()[options.of_rows() ? row : 0] / (options.is_mean() ? divisor.data()[0] : 1);
    const double hit = (1 - options.label_smoothing) * weight_of(classes[row]);
    for (int64_t j = 0; j < columns; ++j) {
      const int64_t of_all = options.first_class + j;
      const double prob =
          std::exp(x.row(row, columns)[j] - maxima.data()[row] - log_sums.data()[row]);
      gradient.row(row, columns)[j] =
          scale * ((hit + uniform * all) * prob - (of_all == classes[row] ? hit : 0) -
                   uniform * weight_of(of_all));
    }
  }
  Tensor to = out;
  torch::stable::copy_(to, gradient.rounded(view.dtype));
}

}  // namespace torch_cubin
