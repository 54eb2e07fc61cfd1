// Cross entropy of a linear layer, without its logits in memory: products of blocks of logits, and
// the kernels of cross entropy, the same on every device.
//
// A pass over blocks of rows computes the losses. For gradients of a loss that is one number, it
// also overwrites each block by its gradient, and multiplies that. Gradients of losses of rows, and
// those in least memory, are computed later from the rows' statistics, in a few parts of the rows,
// and of each in blocks of classes: the logits are multiplied once more, but the gradient of each
// class is rounded once a part.
#include <algorithm>

#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/matmul/matmul.h"
#include "ops/rows/rows.h"

namespace torch_cubin {
namespace {

// Of a block of logits: of rows, as many as keep its products fast; of classes, few, because the
// float32 sum of the input's gradient needs memory as well: of a part of the rows at a time, which
// also is read and written by fewer blocks (8192 x 4096 x 128256, H200: 55.9 -> 54.6 ms).
constexpr int64_t kRowBlockBytes = int64_t{512} << 20, kClassBlockBytes = int64_t{96} << 20;
constexpr int64_t kSumBytes = int64_t{32} << 20;
constexpr int64_t kMostRowParts = 4;  // each rounds the weight's gradient
constexpr int64_t kBlockMultiple = 128;

// Calls body(first, count) for blocks of `size` things, each of so many elements of logits.
template <class Body>
void for_each_block(int64_t size, int64_t elements, int64_t bytes, ScalarType dtype, Body&& body) {
  const int64_t most = bytes / std::max<int64_t>(elements * element_size(dtype), 1);
  const int64_t block = std::max(most / kBlockMultiple, int64_t{1}) * kBlockMultiple;
  for (int64_t first = 0; first < size; first += block) body(first, std::min(block, size - first));
}

Tensor rows_of(const Tensor& tensor, int64_t first, int64_t count) {
  Tensor whole = tensor;  // torch's narrow takes a reference
  return torch::stable::narrow(whole, 0, first, count);
}

OptionalTensor rows_of(const OptionalTensor& tensor, int64_t first, int64_t count) {
  if (!tensor) return std::nullopt;
  return rows_of(*tensor, first, count);
}

void copy_to_rows(const Tensor& to, int64_t first, int64_t count, const Tensor& from) {
  Tensor rows = rows_of(to, first, count);
  torch::stable::copy_(rows, from);
}

Tensor transposed(const Tensor& matrix) { return torch::stable::transpose(matrix, 0, 1); }

// The sum over the rows of a block of the logits' gradient.
Tensor sum_of_rows(const Tensor& block, ScalarType dtype) {
  const int64_t rows[] = {0};
  return torch::stable::sum(block, torch::headeronly::IntHeaderOnlyArrayRef(rows, 1), false, dtype);
}

// The functions of a device.
struct Functions {
  decltype(&linear_cuda) linear;
  decltype(&matmul_out_cuda) matmul_out;
  decltype(&addmm_into_cuda) addmm_into;
  decltype(&cross_entropy_cuda) losses;
  decltype(&reduce_losses_cuda) reduce;
  decltype(&cross_entropy_backward_into_cuda) gradient_into;
};

const Functions& functions_for(const TensorView& input) {
  static constexpr Functions kCuda = {linear_cuda,        matmul_out_cuda,
                                      addmm_into_cuda,    cross_entropy_cuda,
                                      reduce_losses_cuda, cross_entropy_backward_into_cuda};
  static constexpr Functions kCpu = {linear_cpu,        matmul_out_cpu,
                                     addmm_into_cpu,    cross_entropy_cpu,
                                     reduce_losses_cpu, cross_entropy_backward_into_cpu};
  return input.on_cuda() ? kCuda : kCpu;
}

// The arguments of both directions. They are detached: ATen's ops, of which the CPU's functions are
// made, have derivatives of their own.
struct LinearLoss {
  LinearLoss(const Tensor& input_, const Tensor& linear_weight_, const Tensor& target_,
             const OptionalTensor& linear_bias_, const OptionalTensor& weight_,
             LossOptions options_)
      : x(input_),
        w(linear_weight_),
        sizes(check_linear_cross_entropy(x, w, TensorView(target_), view_of(linear_bias_),
                                         view_of(weight_), options_)),
        of(functions_for(x)),
        statistics(statistics_dtype(x.dtype)),
        input(detach(input_)),
        linear_weight(detach(linear_weight_)),
        target(detach(target_)),
        weight(weight_),
        options(std::move(options_)) {
    if (linear_bias_) linear_bias = detach(*linear_bias_);
    options.classes = sizes.columns;
  }

  // Memory for a gradient, which only a call without logits leaves unwritten.
  Tensor gradient(bool needed, const TensorView& like, int64_t dim, ScalarType dtype) const {
    if (!needed) return no_elements(x, x.dtype);
    Tensor out = empty_near(x, like.sizes, dim, dtype);
    return sizes.rows * sizes.columns > 0 ? out : torch::stable::fill_(out, 0);
  }

  const TensorView x, w;
  const RowSizes sizes;  // of the logits
  const Functions& of;
  const ScalarType statistics;
  const Tensor input, linear_weight, target;
  OptionalTensor linear_bias;
  const OptionalTensor& weight;
  LossOptions options;
};

}  // namespace

LinearLosses linear_cross_entropy(const Tensor& input, const Tensor& linear_weight,
                                  const Tensor& target, const OptionalTensor& linear_bias,
                                  const OptionalTensor& weight, const std::string& reduction,
                                  int64_t ignore_index, double label_smoothing, ScalarType dtype,
                                  bool needs_input, bool needs_weight, bool needs_bias) {
  const LinearLoss own(input, linear_weight, target, linear_bias, weight,
                       {reduction, ignore_index, label_smoothing, 0});
  const auto [rows, classes] = own.sizes;
  const bool differentiates = needs_input || needs_weight || needs_bias;
  const auto of_rows = [&] { return empty_near(own.x, own.x.sizes, 1, own.statistics); };
  const Tensor losses = of_rows(), max = of_rows(), log_sum = of_rows();
  Tensor total = no_elements(own.x, own.statistics);
  if (!own.options.of_rows()) {
    total =
        own.of.reduce(std::nullopt, own.target, weight, own.options, own.statistics, dtype).total;
  }
  const Tensor one = torch::stable::fill_(empty_near(own.x, own.x.sizes, 0, own.statistics), 1);
  const Tensor grad_input = own.gradient(needs_input, own.x, 2, own.x.dtype);
  const Tensor grad_weight = own.gradient(needs_weight, own.w, 2, own.x.dtype);
  Tensor grad_bias = own.gradient(needs_bias, own.w, 1, own.statistics);
  for_each_block(rows, classes, kRowBlockBytes, own.x.dtype, [&](int64_t first, int64_t count) {
    const Tensor x = rows_of(own.input, first, count), targets = rows_of(own.target, first, count);
    const Tensor logits = own.of.linear(x, own.linear_weight, own.linear_bias);
    const auto [block_losses, none, block_max, block_log_sum] = own.of.losses(
        logits, targets, weight, "none", ignore_index, label_smoothing, own.statistics);
    copy_to_rows(losses, first, count, block_losses);
    copy_to_rows(max, first, count, block_max);
    copy_to_rows(log_sum, first, count, block_log_sum);
    if (!differentiates) return;
    own.of.gradient_into(logits, one, logits, targets, weight, total, block_max, block_log_sum,
                         own.options);
    if (needs_input) {
      own.of.matmul_out(logits, own.linear_weight, rows_of(grad_input, first, count));
    }
    if (needs_weight) own.of.addmm_into(grad_weight, transposed(logits), x, first > 0 ? 1 : 0, 1);
    if (!needs_bias) return;
    const Tensor sum = sum_of_rows(logits, own.statistics);
    grad_bias = first > 0 ? torch::stable::subtract(grad_bias, sum, -1) : sum;
  });
  Tensor loss = torch::stable::to(losses, dtype);
  if (!own.options.of_rows()) {
    loss = own.of.reduce(losses, own.target, weight, own.options, own.statistics, dtype).loss;
  }
  return {loss,
          total,
          max,
          log_sum,
          grad_input,
          grad_weight,
          torch::stable::to(grad_bias, own.x.dtype)};
}

LinearGradients linear_cross_entropy_backward(
    const Tensor& grad, const Tensor& input, const Tensor& linear_weight, const Tensor& target,
    const OptionalTensor& linear_bias, const OptionalTensor& weight, const Tensor& total,
    const Tensor& max, const Tensor& log_sum, const std::string& reduction, int64_t ignore_index,
    double label_smoothing, bool needs_input, bool needs_weight, bool needs_bias) {
  LinearLoss own(input, linear_weight, target, linear_bias, weight,
                 {reduction, ignore_index, label_smoothing, 0});
  const auto [rows, classes] = own.sizes;
  const Tensor grad_input = own.gradient(needs_input, own.x, 2, own.x.dtype);
  const Tensor grad_weight = own.gradient(needs_weight, own.w, 2, own.x.dtype);
  const Tensor grad_bias = own.gradient(needs_bias, own.w, 1, own.statistics);
  const int64_t features = own.x.sizes[1];
  const int64_t in_sum = kSumBytes / std::max<int64_t>(features * element_size(own.statistics), 1);
  const int64_t most = std::max(in_sum, ceil_div(rows, kMostRowParts));
  const int64_t part = ceil_div(std::max<int64_t>(most, 1), kBlockMultiple) * kBlockMultiple;
  for (int64_t row = 0; classes > 0 && row < rows; row += part) {
    const int64_t count = std::min(part, rows - row);
    const int64_t shape[] = {count, features};
    const Tensor sum = needs_input ? empty_near(own.x, shape, 2, own.statistics)
                                   : no_elements(own.x, own.statistics);
    const auto of_part = [&](const Tensor& tensor) { return rows_of(tensor, row, count); };
    const Tensor x = of_part(own.input), targets = of_part(own.target);
    const Tensor losses_grad = own.options.of_rows() ? of_part(grad) : grad;
    const Tensor part_max = of_part(max), part_log_sum = of_part(log_sum);
    for_each_block(
        classes, count, kClassBlockBytes, own.x.dtype, [&](int64_t first, int64_t block) {
          const Tensor w = rows_of(own.linear_weight, first, block);
          const Tensor logits = own.of.linear(x, w, rows_of(own.linear_bias, first, block));
          own.options.first_class = first;
          own.of.gradient_into(logits, losses_grad, logits, targets, weight, total, part_max,
                               part_log_sum, own.options);
          if (needs_input) own.of.addmm_into(sum, logits, w, first > 0 ? 1 : 0, 1);
          if (needs_weight) {
            const Tensor of_block = rows_of(grad_weight, first, block);
            own.of.addmm_into(of_block, transposed(logits), x, row > 0 ? 1 : 0, 1);
          }
          if (!needs_bias) return;
          Tensor bias = sum_of_rows(logits, own.statistics);
          if (row > 0) bias = torch::stable::subtract(rows_of(grad_bias, first, block), bias, -1);
          copy_to_rows(grad_bias, first, block, bias);
        });
    if (needs_input) copy_to_rows(grad_input, row, count, sum);
  }
  return {grad_input, grad_weight, torch::stable::to(grad_bias, own.x.dtype)};
}

}  // namespace torch_cubin
