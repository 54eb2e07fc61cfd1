// Attention composed of two products (csrc/ops/matmul/matmul.h) and the softmax family between
// them. For calls that no fused kernel supports: float64, wide heads, and for float32's backward of
// few rows.
//
// On the CPU it is a reference, as its parts are.
#pragma once

#include <tuple>

#include "ops/attention/compose/softmax.h"
#include "ops/attention/problem/operands.h"

namespace torch_cubin {

// [batch, heads, rows, columns] with any strides (expanded dims included); key and value have kv
// heads, which divide query's. Nothing is checked again.
//
// The scores take batch * heads * seqlen_q * seqlen_k elements of float32 (float64 for float64), in
// parts of whole heads if that is large. float16 and bfloat16 operands are converted to float32
// first, so that scores and weights are never rounded to 16 bits. (If PyTorch's settings allow
// TF32, it holds such values exactly.)
struct ComposeInputs {
  Tensor query, key, value;
  AttentionOptions options;  // their tensors in four dims, or by head
};

// The options of some of a call's batches and heads: those of their tensors that have values for
// each.
AttentionOptions options_of_part(const AttentionOptions& all, int64_t batch, int64_t batches,
                                 int64_t head, int64_t heads);

// The operands of a call as (batch, heads, rows, columns), batch dims merged. Throws [no_kernel]
// for packed sequences, which only fused kernels support.
ComposeInputs compose_inputs(const AttentionCall& call);

// out [batch, heads, seqlen_q, head_dim_v] of value's dtype and logsumexp [batch, heads, seqlen_q]
// of the scores' dtype, both contiguous. If it is not wanted, logsumexp has no elements.
std::tuple<Tensor, Tensor> compose_forward(const ComposeInputs& inputs,
                                           const AttentionSettings& settings, bool want_logsumexp);

// Gradients of query, key and value, contiguous. `out` and `logsumexp` may cover more columns than
// key has, as in ring attention: the weights are exp(logit - logsumexp).
std::tuple<Tensor, Tensor, Tensor> compose_backward(const ComposeInputs& inputs,
                                                    const AttentionSettings& settings,
                                                    const Tensor& grad_out, const Tensor& out,
                                                    const Tensor& logsumexp);

// compose_backward() of a call: the gradients of query, key and value, summed over broadcast dims.
std::tuple<Tensor, Tensor, Tensor> compose_gradients(const AttentionCall& call,
                                                     const Tensor& grad_out, const Tensor& out,
                                                     const Tensor& logsumexp);

}  // namespace torch_cubin
