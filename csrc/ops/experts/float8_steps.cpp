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

// A weight, or with `transpose` its matrices' transposes, which have the same scales.
Float8Weight quantised(const Float8Steps& steps, const Tensor& weight, bool transpose) {
  const TensorView view(weight);
  const bool stored_transposed = is_stored_transposed(view);
  const Tensor own = stored_transposed ? matrices_transposed(weight) : weight;
  const TensorView matrices(own);
  const int64_t count = matrices.sizes[0], rows = matrices.sizes[1], columns = matrices.sizes[2];
  const int64_t row_blocks = ceil_div(rows, kScaleBlock), blocks = ceil_div(columns, kScaleBlock);
  const int64_t height = count == 1 ? rows : row_blocks * kScaleBlock;
  const bool turns = transpose != stored_transposed;
  const auto [data, scale] =
      steps.quantize(stacked(own, height), kScaleBlock128x128, turns, false, "none", std::nullopt);
  // Scales are those of the operand's transpose.
  const Tensor own_scale = matrices_transposed(scale);
  if (!turns) {
    Tensor all = torch::stable::view(data, {count, height, columns});
    return {torch::stable::narrow(all, 1, 0, rows),
            torch::stable::view(own_scale, {count, row_blocks, blocks})};
  }
  Tensor all = torch::stable::view(data, {columns, count, height});
  const Tensor part = torch::stable::narrow(all, 2, 0, rows);
  const Tensor scales = torch::stable::view(own_scale, {blocks, count, row_blocks});
  return {torch::stable::transpose(part, 0, 1), torch::stable::transpose(scales, 0, 1)};
}

}  // namespace

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
                      const Tensor& w2, const Tensor& ends, Tensor* before) {
  const ScalarType dtype = TensorView(w13).dtype;
  // A weight's copy of 8 bits lives as long as its product.
  const auto gated = [&]() -> Quantized {
    const Float8Weight first = quantised(steps, w13, false);
    if (before == nullptr) return float8_gated_rows(steps, rows, first, ends, dtype);
    *before = float8_product(steps, rows, first, ends, dtype);
    return steps.quantize(*before, kScaleBlock1x128, false, false, "silu", std::nullopt);
  };
  const Quantized inside = gated();
  return float8_product(steps, inside, quantised(steps, w2, false), ends, dtype);
}

Tensor float8_input_gradient(const Float8Steps& steps, const Quantized& grad, const Tensor& weight,
                             const Tensor& ends) {
  return float8_product(steps, grad, quantised(steps, weight, true), ends,
                        TensorView(weight).dtype);
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
