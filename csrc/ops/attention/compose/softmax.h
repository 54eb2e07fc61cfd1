// The softmax family: the steps between the products of composed attention, and the private ops
// that torch_cubin/_ops/attention_compose.py differentiates.
//
// Scores are [batch, heads, rows, columns], contiguous, float32 or float64; their logits and
// weights are defined in csrc/kernels/softmax/softmax_params.h. CUDA uses the kernels of the
// catalog, the CPU a plain reference (softmax_reference.cpp). Of the options only the tensors
// count; a mask broadcasts to the scores and may be float64, too.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include "kernels/softmax/softmax_params.h"
#include "ops/attention/problem/options.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// The position of these scores among those of a call, whose heads are numbered for dropout.
struct HeadRange {
  int64_t first = 0;      // batch * all + head of the first
  int64_t all_heads = 0;  // of the call
};

// weights = dropout(softmax(logits of scores)), in place; and logsumexp [batch, heads, rows], of
// the scores' dtype, unless it is null.
void softmax_forward(const AttentionSettings& settings, const AttentionOptions& options,
                     HeadRange heads, const Tensor& scores, const Tensor* logsumexp);

// In place: scores become the forward's weights, grad (of those weights) becomes that of the
// scores. delta [batch, heads, rows] is the sum of weights * grad in each row.
void softmax_backward(const AttentionSettings& settings, const AttentionOptions& options,
                      HeadRange heads, const Tensor& scores, const Tensor& grad,
                      const Tensor& logsumexp, const Tensor& delta);

// The private ops, on either device; api/signatures.cpp has the options of each. The first two have
// no dropout.
std::tuple<Tensor, Tensor> attention_softmax(const Tensor& scores, const AttentionOptions& options);
Tensor attention_softmax_backward(const Tensor& grad, const Tensor& probs,
                                  const OptionalTensor& grad_logsumexp,
                                  const OptionalTensor& scores, const AttentionOptions& options);
Tensor attention_dropout(const Tensor& probs, const AttentionOptions& options);

enum SoftmaxKind { kSoftmaxForward, kSoftmaxBackward, kSoftmaxDropout, kSoftmaxKinds };

// On the device of the scores: the catalog's kernel, or the reference.
void run_softmax(SoftmaxKind kind, const TensorView& scores, const SoftmaxParams& params);

// Computes what the kernel of that kind computes, with pointers to the CPU's memory.
void softmax_reference(SoftmaxKind kind, ScalarType dtype, const SoftmaxParams& params);

}  // namespace torch_cubin
