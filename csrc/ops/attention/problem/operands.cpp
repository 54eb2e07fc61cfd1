#include "ops/attention/problem/operands.h"

#include <algorithm>
#include <optional>

#include "ops/attention/problem/problem.h"
#include "ops/common/dispatch.h"
#include "ops/common/stable_ops.h"

namespace torch_cubin {

OptionalTensor contiguous(const OptionalTensor& tensor) {
  if (!tensor) return std::nullopt;
  return torch::stable::contiguous(*tensor);
}

std::vector<int64_t> sizes_of(const TensorView& view) {
  return std::vector<int64_t>(view.sizes, view.sizes + view.dim);
}

Shape shape_of(const TensorView& view) {
  Shape shape;
  shape.dim = view.dim;
  std::copy(view.sizes, view.sizes + view.dim, shape.sizes);
  return shape;
}

int64_t padded_columns(int64_t columns, ScalarType dtype) {
  const int64_t vector = 16 / element_size(dtype);
  return (columns + vector - 1) / vector * vector;
}

Tensor vector_rows(const Tensor& tensor) {
  const TensorView view(tensor);
  if (has_vector_rows(view)) return tensor;
  std::vector<int64_t> sizes = sizes_of(view);
  const int64_t columns = sizes.back();
  sizes.back() = padded_columns(columns, view.dtype);
  Tensor copy = sizes.back() == columns ? torch::stable::new_empty(tensor, sizes, view.dtype)
                                        : torch::stable::new_zeros(tensor, sizes, view.dtype);
  Tensor part = torch::stable::narrow(copy, -1, 0, columns);
  torch::stable::copy_(part, tensor);
  return copy;
}

namespace {

Tensor expand(const Tensor& tensor, const AttentionShape& shape, int64_t heads, int64_t rows,
              int64_t columns) {
  std::vector<int64_t> sizes = shape.batch.vector();
  if (shape.has_heads) sizes.push_back(heads);
  sizes.push_back(rows);
  sizes.push_back(columns);
  if (sizes == sizes_of(TensorView(tensor))) return tensor;
  return call_tensor_op("aten::expand", "", tensor, sizes, false);
}

}  // namespace

Tensor repeat_heads(const Tensor& tensor, const AttentionShape& shape) {
  const TensorView view(tensor);
  const int64_t own = view.dim > 2 && !shape.packed ? view.sizes[view.dim - 3] : 1;
  if (own == 1 || own == shape.kv_heads) return tensor;
  return call_tensor_op("aten::repeat_interleave", "self_int", tensor, shape.kv_heads / own,
                        std::optional<int64_t>(-3), std::nullopt);
}

Tensor expand_leading(const Tensor& tensor, const AttentionShape& shape, int64_t heads) {
  const TensorView view(tensor);
  return expand(tensor, shape, heads, view.sizes[view.dim - 2], view.sizes[view.dim - 1]);
}

Tensor expand_mask(const Tensor& mask, const AttentionShape& shape) {
  return expand(mask, shape, shape.heads, shape.seqlen_q, shape.seqlen_k);
}

Tensor sum_to_operand(const Tensor& grad, const AttentionShape& shape, const TensorView& operand) {
  std::vector<int64_t> sizes = shape.batch.vector();
  const TensorView view(grad);
  const int64_t rows = view.sizes[view.dim - 2], columns = view.sizes[view.dim - 1];
  Tensor out = grad;
  if (shape.has_heads) {
    int64_t heads = 1;
    for (int64_t i = 0; i < view.dim - 2; ++i) heads *= view.sizes[i];
    const int64_t batch = shape.batch.numel();
    heads = batch > 0 ? heads / batch : 0;
    const int64_t own = operand.dim > 2 ? operand.sizes[operand.dim - 3] : 1;
    std::vector<int64_t> split = sizes;
    split.insert(split.end(), {own, own > 0 ? heads / own : 1, rows, columns});
    out = torch::stable::reshape(out, split);
    if (own != heads) out = torch::stable::sum(out, {{-3}}, false);
    sizes.push_back(own);
  }
  sizes.push_back(rows);
  sizes.push_back(columns);
  out = torch::stable::reshape(out, sizes);
  const auto dims = static_cast<int64_t>(sizes.size());
  for (int64_t i = 0; i < dims - 2; ++i) {
    const int64_t at = operand.dim - dims + i;
    const int64_t own = at >= 0 ? operand.sizes[at] : 1;
    if (own == 1 && sizes[i] != 1) out = torch::stable::sum(out, {{i}}, true);
  }
  return torch::stable::reshape(out, sizes_of(operand));
}

Tensor empty_laid_out(const TensorView& like, const Shape& sizes, ScalarType dtype) {
  int64_t strides[kMaxDims];
  output_strides(like, sizes, strides);
  return empty_cuda_strided(sizes.sizes, strides, sizes.dim, dtype, like.device_index);
}

}  // namespace torch_cubin
