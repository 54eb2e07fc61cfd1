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
#include "ops/attention/problem/arguments.h"
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

// The random numbers for dropout of attention weights, as csrc/kernels/common/dropout.cuh defines
// them: a pure function of the seed and a weight's position (Philox 4x32, 7 rounds: Salmon et al.,
// SC 2011).
//
// One Philox call gives the numbers of 8 weights of a row, in columns 32 block + 8 word + 2 pair +
// half for word = 0..3 and half = 0..1: 16 bits each, the low half of a word first.
struct DropoutBits {
  uint32_t words[4];

  // head: batch * heads + head of the query.
  DropoutBits(uint64_t seed, int64_t head, int64_t row, int64_t block, int64_t pair) {
    uint32_t c0 = static_cast<uint32_t>(row);
    uint32_t c1 = static_cast<uint32_t>(block * 4 + pair);
    uint32_t c2 = static_cast<uint32_t>(head), c3 = 0;
    auto k0 = static_cast<uint32_t>(seed);
    auto k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 7; ++round) {
      const uint64_t p0 = uint64_t{c0} * 0xD2511F53u, p1 = uint64_t{c2} * 0xCD9E8D57u;
      const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
      const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
      c1 = static_cast<uint32_t>(p1);
      c3 = static_cast<uint32_t>(p0);
      c0 = n0;
      c2 = n2;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
  }

  int number(int word, int half) const {
    return static_cast<int>(half == 0 ? words[word] & 0xFFFF : words[word] >> 16);
  }
};

}  // namespace torch_cubin
