// Ops over rows, the last dimension of a tensor or the last few: layer norm, RMS norm, softmax,
// log-softmax and cross entropy, and their derivatives. Rows are independent: a row's bits depend
// on its own values and its length alone.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ops/common/shape.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// The public ops, with the arguments of PyTorch's.
void rms_norm_composite(StableIValue* stack, uint64_t, uint64_t);
void add_rms_norm_composite(StableIValue* stack, uint64_t, uint64_t);
void layer_norm_composite(StableIValue* stack, uint64_t, uint64_t);
void softmax_composite(StableIValue* stack, uint64_t, uint64_t);
void log_softmax_composite(StableIValue* stack, uint64_t, uint64_t);

void cross_entropy_composite(StableIValue* stack, uint64_t, uint64_t);
void linear_cross_entropy_composite(StableIValue* stack, uint64_t, uint64_t);

using OptionalTensor = std::optional<Tensor>;

// The result, input + residual (empty without one), and the statistics of each row: its mean (empty
// unless `centered`) and 1 / sqrt(variance + eps), around 0 unless centered. `eps` is by default
// that of float32, for float64 its own.
using Normed = std::tuple<Tensor, Tensor, Tensor, Tensor>;
Normed norm_cpu(const Tensor& input, const OptionalTensor& residual,
                const std::vector<int64_t>& normalized_shape, const OptionalTensor& weight,
                const OptionalTensor& bias, std::optional<double> eps, bool centered);
decltype(norm_cpu) norm_cuda;

// The gradients of what was normalized, x, to which grad_sum is added, and of weight and bias, each
// empty unless asked for. eps is for the derivative of this op.
using NormGradients = std::tuple<Tensor, Tensor, Tensor>;
NormGradients norm_backward_cpu(const Tensor& grad_out, const OptionalTensor& grad_sum,
                                const Tensor& x, const Tensor& mean, const Tensor& rstd,
                                const OptionalTensor& weight, int64_t dims,
                                std::optional<double> eps, bool centered, bool needs_weight,
                                std::optional<ScalarType> bias_dtype);
decltype(norm_backward_cpu) norm_backward_cuda;

// Both on CUDA, with only those results allocated that a call has or asks for: no tensor in place
// of the others. `mean` is null unless the rows were centered.
struct NormResults {
  Tensor out;
  OptionalTensor sum, mean;
  Tensor rstd;
};
NormResults normalize(const Tensor& input, const OptionalTensor& residual,
                      const std::vector<int64_t>& normalized_shape, const OptionalTensor& weight,
                      const OptionalTensor& bias, std::optional<double> eps, bool centered);

struct NormGradientsWanted {
  bool x = true, weight = false;
  std::optional<ScalarType> bias;
};
struct NormGradientsFound {
  OptionalTensor x, weight, bias;
};
NormGradientsFound differentiate_norm(const Tensor& grad_out, const OptionalTensor& grad_sum,
                                      const Tensor& x, const Tensor* mean, const Tensor& rstd,
                                      const OptionalTensor& weight, int64_t dims,
                                      const NormGradientsWanted& wanted);

// Along the last dim. `dtype` is the result's: the input's, or float32.
Tensor softmax_cpu(const Tensor& input, bool log, ScalarType dtype);
Tensor softmax_cuda(const Tensor& input, bool log, ScalarType dtype);

// The gradient of the input, which had the dtype `dtype`; `output` is softmax's.
Tensor softmax_backward_cpu(const Tensor& grad_out, const Tensor& output, bool log,
                            ScalarType dtype);
decltype(softmax_backward_cpu) softmax_backward_cuda;

// Sums over the last dim, by kind (kernels/rows/sum_params.h), in `dtype`: for the reductions that
// install(batch_invariant=True) serves.
Tensor row_sums_cpu(const Tensor& input, int64_t kind, double divisor, ScalarType dtype);
Tensor row_sums_cuda(const Tensor& input, int64_t kind, double divisor, ScalarType dtype);

// Sums over the rows of a tensor whose last `dims` dims are a row, into a contiguous tensor of its
// dtype or float32. The input is float16, bfloat16 or float32.
void column_sums_cuda(const Tensor& input, int64_t dims, const Tensor& out);

// How cross entropy is reduced, and its other options.
struct LossOptions {
  std::string reduction;  // "none", "sum" or "mean"
  int64_t ignore_index;
  double label_smoothing;
  int64_t classes;          // all of them, of which gradients may be computed in blocks
  int64_t first_class = 0;  // of such a block

  bool of_rows() const { return reduction == "none"; }
  bool is_mean() const { return reduction == "mean"; }
};

// out *= factor, a number on its device, in out's memory, which is contiguous.
void scale_into_cpu(const Tensor& out, const Tensor& factor);
void scale_into_cuda(const Tensor& out, const Tensor& factor);

// Of rows of classes, the last dim: their losses or what those are reduced to, in `dtype`; the sum
// of the weights of the targets' classes (empty for losses of rows); and, in float32 (float64), of
// each row that is not ignored the maximum and the logarithm of the sum of exp(x - maximum). The
// last two are apart because their sum, logsumexp, has too few digits for the gradient. A target
// that is no class makes NaN on CUDA and an error on the CPU.
using Losses = std::tuple<Tensor, Tensor, Tensor, Tensor>;
Losses cross_entropy_cpu(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                         const std::string& reduction, int64_t ignore_index, double label_smoothing,
                         ScalarType dtype);
decltype(cross_entropy_cpu) cross_entropy_cuda;
Tensor cross_entropy_backward_cpu(const Tensor& grad, const Tensor& input, const Tensor& target,
                                  const OptionalTensor& weight, const Tensor& total,
                                  const Tensor& max, const Tensor& log_sum,
                                  const std::string& reduction, int64_t ignore_index,
                                  double label_smoothing);
decltype(cross_entropy_backward_cpu) cross_entropy_backward_cuda;

// The gradient written to `out`, of the input's shape, dense; it may be the input itself. The input
// has some of the classes, `weight` all.
void cross_entropy_backward_into_cpu(const Tensor& out, const Tensor& grad, const Tensor& input,
                                     const Tensor& target, const OptionalTensor& weight,
                                     const Tensor& total, const Tensor& max, const Tensor& log_sum,
                                     const LossOptions& options);
void cross_entropy_backward_into_cuda(const Tensor& out, const Tensor& grad, const Tensor& input,
                                      const Tensor& target, const OptionalTensor& weight,
                                      const Tensor& total, const Tensor& max, const Tensor& log_sum,
                                      const LossOptions& options);

// The sum or mean of losses of rows, which are float32 (float64), in `dtype`, and the sum of the
// weights of the targets' classes, without losses that alone.
struct ReducedLosses {
  Tensor loss, total;
};
ReducedLosses reduce_losses_cpu(const OptionalTensor& losses, const Tensor& target,
                                const OptionalTensor& weight, const LossOptions& options,
                                ScalarType statistics, ScalarType dtype);
decltype(reduce_losses_cpu) reduce_losses_cuda;

// Cross entropy of linear(input, linear_weight, linear_bias), by linear_loss.cpp: the results of
// cross_entropy, and the gradients of input, linear_weight and linear_bias for a gradient of one,
// each empty unless asked for. Those of losses of rows are only computed later.
using LinearLosses = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
LinearLosses linear_cross_entropy(const Tensor& input, const Tensor& linear_weight,
                                  const Tensor& target, const OptionalTensor& linear_bias,
                                  const OptionalTensor& weight, const std::string& reduction,
                                  int64_t ignore_index, double label_smoothing, ScalarType dtype,
                                  bool needs_input, bool needs_weight, bool needs_bias);

// The gradients, with the logits computed once more.
using LinearGradients = std::tuple<Tensor, Tensor, Tensor>;
LinearGradients linear_cross_entropy_backward(
    const Tensor& grad, const Tensor& input, const Tensor& linear_weight, const Tensor& target,
    const OptionalTensor& linear_bias, const OptionalTensor& weight, const Tensor& total,
    const Tensor& max, const Tensor& log_sum, const std::string& reduction, int64_t ignore_index,
    double label_smoothing, bool needs_input, bool needs_weight, bool needs_bias);

// Rows of one tensor.
struct RowSizes {
  int64_t rows = 1, columns = 1;
};

// Those of a tensor whose last `dims` dims are a row.
inline RowSizes row_sizes(const TensorView& x, int64_t dims) {
  RowSizes sizes;
  for (int64_t i = 0; i < x.dim; ++i) {
    (i < x.dim - dims ? sizes.rows : sizes.columns) *= x.sizes[i];
  }
  return sizes;
}

// The checks of these ops, which throw [input]; on every device.
RowSizes check_norm(const char* op, const TensorView& input,
                    const std::optional<TensorView>& residual,
                    const std::vector<int64_t>& normalized_shape,
                    const std::optional<TensorView>& weight, const std::optional<TensorView>& bias);
RowSizes check_norm_backward(const TensorView& grad_out, const std::optional<TensorView>& grad_sum,
                             const TensorView& x, const TensorView& mean, const TensorView& rstd,
                             const std::optional<TensorView>& weight, int64_t dims, bool centered);
RowSizes check_softmax(const TensorView& input, bool log, ScalarType dtype);
RowSizes check_softmax_backward(const TensorView& grad_out, const TensorView& output, bool log,
                                ScalarType dtype);

RowSizes check_row_sums(const TensorView& input, int64_t kind);

RowSizes check_cross_entropy(const TensorView& input, const TensorView& target,
                             const std::optional<TensorView>& weight, const LossOptions& options);
RowSizes check_cross_entropy_backward(const TensorView& grad, const TensorView& input,
                                      const TensorView& target,
                                      const std::optional<TensorView>& weight,
                                      const TensorView& total, const TensorView& max,
                                      const TensorView& log_sum, const LossOptions& options);
LossOptions loss_options(const TensorView& input, const std::string& reduction,
                         int64_t ignore_index, double label_smoothing);
// The logits' sizes.
RowSizes check_linear_cross_entropy(const TensorView& input, const TensorView& linear_weight,
                                    const TensorView& target,
                                    const std::optional<TensorView>& linear_bias,
                                    const std::optional<TensorView>& weight, LossOptions options);

// The public op that a call of norm is made by.
const char* norm_name(bool centered, bool residual);
// The dtype of a row's statistics.
inline ScalarType statistics_dtype(ScalarType dtype) { return sums_dtype(dtype); }
double eps_of(std::optional<double> eps, ScalarType dtype);
// The statistics' shape: that of x with the last `dims` sizes 1.
Shape statistics_shape(const TensorView& x, int64_t dims);

// What an op returns in place of a result that a call does not have.
Tensor no_elements(const TensorView& like, ScalarType dtype);

// The checks of norm and softmax for tensors that Python describes: {"op": a public op,
// "normalized_shape": [...], "tensors": {"input": tensor, "residual": ...}}, or "dtype", or
// "label_smoothing".
void check_described_rows(const nlohmann::json& call);

}  // namespace torch_cubin
