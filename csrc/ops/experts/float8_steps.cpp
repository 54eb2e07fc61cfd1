// The products of layers of experts of 8-bit floats.
#include <algorithm>
#include <utility>

#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/experts/experts.h"
#include "ops/experts/float8.h"
#include "ops/grouped/grouped.h"

namespace torch_cubin {
namespace {

// Matrices below one another, each with rows of zeros up to a multiple of 128, so that no block
// has elements of two.
Tensor stacked(const Tensor& matrices, int64_t height) {
  const TensorView view(matrices);
  const int64_t count = view.sizes[0], rows = view.sizes[1], columns = view.sizes[2];
  Tensor all = as_contiguous(detach(matrices));
  if (rows != height) {
    const int64_t sizes[] = {count, height, columns};
    Tensor padded = empty_near(view, sizes, 3, view.dtype);
    torch::stable::zero_(padded);
    Tensor own = torch::stable::narrow(padded, 1, 0, rows);
    torch::stable::copy_(own, all);
    all = padded;
  }
  return torch::stable::view(all, {count * height, columns});
}

// Matrices that are quantised below one another: `rows` of each, which begin `height` apart.
struct Stack {
  explicit Stack(const TensorView& matrices)
      : count(matrices.sizes[0]), rows(matrices.sizes[1]), columns(matrices.sizes[2]) {
    if (count > 1) height = ceil_div(rows, kScaleBlock) * kScaleBlock;
  }

  // The matrices, of the result for all, or of that for its transpose theirs.
  Float8Weight own(const Quantized& all, bool transposed) const {
    const int64_t row_blocks = ceil_div(rows, kScaleBlock), blocks = ceil_div(columns, kScaleBlock);
    // Scales are those of the operand's transpose.
    const Tensor scale = matrices_transposed(std::get<1>(all));
    Tensor data = std::get<0>(all);
    if (!transposed) {
      data = torch::stable::view(data, {count, height, columns});
      return {torch::stable::narrow(data, 1, 0, rows),
              torch::stable::view(scale, {count, row_blocks, blocks})};
    }
    data = torch::stable::view(data, {columns, count, height});
    const Tensor part = torch::stable::narrow(data, 2, 0, rows);
    const Tensor scales = torch::stable::view(scale, {blocks, count, row_blocks});
    return {torch::stable::transpose(part, 0, 1), torch::stable::transpose(scales, 0, 1)};
  }

  int64_t count, rows, columns, height = rows;
};

// A weight, or with `transpose` its matrices' transposes, which have the same scales.
Float8Weight quantised(const Float8Steps& steps, const Tensor& weight, bool transpose) {
  const bool stored_transposed = is_stored_transposed(TensorView(weight));
  const Tensor own = stored_transposed ? matrices_transposed(weight) : weight;
  const Stack stack{TensorView(own)};
  const bool turns = transpose != stored_transposed;
  return stack.own(steps.quantize(stacked(own, stack.height), kScaleBlock128x128, turns, false,
                                  "none", std::nullopt),
                   turns);
}

}  // namespace

Float8Copies float8_copies(const Float8Steps& steps, const Tensor& weight) {
  const bool stored_transposed = is_stored_transposed(TensorView(weight));
  const Tensor own = stored_transposed ? matrices_transposed(weight) : weight;
  const Stack stack{TensorView(own)};
  const QuantizedBoth both = steps.weight(stacked(own, stack.height));
  Float8Copies out{stack.own(both.rows, false), stack.own(both.columns, true)};
  if (stored_transposed) std::swap(out.own, out.transposed);
  return out;
}

Quantized float8_gated_rows(const Float8Steps& steps, const Quantized& rows,
                            const Float8Weight& first, const Tensor& ends, ScalarType dtype) {
  const auto& [data, scale] = rows;
  return steps.gated(data, matrices_transposed(first.data), scale, matrices_transposed(first.scale),
                     "silu", ends, dtype, std::nullopt, std::nullopt, false);
}

Tensor float8_product(const Float8Steps& steps, const Quantized& rows, const Float8Weight& weight,
                      const Tensor& ends, ScalarType dtype) {
  const auto& [data, scale] = rows;
  return steps.product(data, matrices_transposed(weight.data), scale, kScaleBlock1x128,
                       matrices_transposed(weight.scale), kScaleBlock128x128, ends, dtype, false);
}

Tensor float8_results(const Float8Steps& steps, const Quantized& rows, const Tensor& w13,
                      const Tensor& w2, const Float8Given& given, const Tensor& ends,
                      Tensor* before) {
  const ScalarType dtype = TensorView(w13).dtype;
  // A weight's copy of 8 bits lives as long as its product.
  const auto gated = [&]() -> Quantized {
    const Float8Weight first = given.w13 ? *given.w13 : quantised(steps, w13, false);
    if (before == nullptr) return float8_gated_rows(steps, rows, first, ends, dtype);
    *before = float8_product(steps, rows, first, ends, dtype);
    return steps.quantize(*before, kScaleBlock1x128, false, false, "silu", std::nullopt);
  };
  const Quantized inside = gated();
  const Float8Weight second = given.w2 ? *given.w2 : quantised(steps, w2, false);
  return float8_product(steps, inside, second, ends, dtype);
}

Tensor float8_input_gradient(const Float8Steps& steps, const Quantized& grad, const Tensor& weight,
                             const std::optional<Float8Weight>& given, const Tensor& ends) {
  const Float8Weight own = given ? *given : quantised(steps, weight, true);
  return float8_product(steps, grad, own, ends, TensorView(weight).dtype);
}

Tensor float8_weight_gradient(const Float8Steps& steps, const Quantized& grad,
                              const Quantized& input, const TensorView& weight,
                              const GroupBlocks& blocks) {
  const bool transposed = is_stored_transposed(weight);
  const Tensor out = steps.weight_gradient(transposed ? input : grad, transposed ? grad : input,
                                           blocks, weight.dtype);
  return transposed ? matrices_transposed(out) : out;
}

}  // namespace torch_cubin
