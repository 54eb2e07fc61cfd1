// Tensors entering and leaving the attention kernels: copies where no kernel can read the
// layout, outputs laid out by the rule, sums over what was broadcast.
#pragma once

#include <vector>

#include "ops/attention/problem/checks.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// The tensor itself where it is contiguous, else a copy; none where there is none.
OptionalTensor contiguous(const OptionalTensor& tensor);

std::vector<int64_t> sizes_of(const TensorView& view);

// `tensor` itself where kernels can read its rows; else a copy whose rows are whole vectors, zeros
// past their ends.
Tensor vector_rows(const Tensor& tensor);

// Columns of the copy that vector_rows() makes.
int64_t padded_columns(int64_t columns, ScalarType dtype);

// key or value with the problem's kv_heads: itself, or a copy where enable_gqa gave key and value
// different numbers of heads.
Tensor repeat_heads(const Tensor& tensor, const AttentionShape& shape);

// `tensor` with the leading dims of the problem and `heads`, broadcast as a view.
Tensor expand_leading(const Tensor& tensor, const AttentionShape& shape, int64_t heads);

// The mask as a view of shape (batch..., heads, seqlen_q, seqlen_k).
Tensor expand_mask(const Tensor& mask, const AttentionShape& shape);

// A gradient of shape (batch..., some heads, rows, cols), in any number of dims, summed to the
// operand that it is of.
Tensor sum_to_operand(const Tensor& grad, const AttentionShape& shape, const TensorView& operand);

// A fresh CUDA tensor of `sizes`, on like's device, its dims in memory in the order of like's.
Tensor empty_laid_out(const TensorView& like, const Shape& sizes, ScalarType dtype);

Shape shape_of(const TensorView& view);

}  // namespace torch_cubin
