// Tensors entering and leaving the attention kernels: copies if no kernel can read the layout,
// outputs with the required layout, sums over broadcast dims.
#pragma once

#include <vector>

#include "ops/attention/problem/checks.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// The tensor itself if it is contiguous, else a copy; none if there is no tensor.
OptionalTensor contiguous(const OptionalTensor& tensor);

std::vector<int64_t> sizes_of(const TensorView& view);

// `tensor` itself if kernels can read its rows, else a copy whose rows are whole vectors, padded
// with zeros.
Tensor vector_rows(const Tensor& tensor);

// Number of columns in the copy that vector_rows() makes.
int64_t padded_columns(int64_t columns, ScalarType dtype);

// key or value with the problem's kv_heads: itself, or a copy if enable_gqa gave key and value
// different numbers of heads.
Tensor repeat_heads(const Tensor& tensor, const AttentionShape& shape);

// `tensor` broadcast, as a view, to the problem's leading dims and `heads`.
Tensor expand_leading(const Tensor& tensor, const AttentionShape& shape, int64_t heads);

// The mask as a view of shape (batch..., heads, seqlen_q, seqlen_k).
Tensor expand_mask(const Tensor& mask, const AttentionShape& shape);

// Sums a gradient of shape (batch..., some heads, rows, cols), with any number of dims, to the
// shape of its operand.
Tensor sum_to_operand(const Tensor& grad, const AttentionShape& shape, const TensorView& operand);

// A fresh CUDA tensor of `sizes` on like's device, with the dims in the order of like's in memory.
Tensor empty_laid_out(const TensorView& like, const Shape& sizes, ScalarType dtype);

Shape shape_of(const TensorView& view);

}  // namespace torch_cubin
