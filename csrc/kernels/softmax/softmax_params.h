// The one parameter of every kernel of the softmax family, shared by host and device code.
//
// Scores, weights and their gradients are contiguous [batch, head, row i, column j], float or
// double as the kernel's name says ("Real"). A score becomes a logit, and logits become weights:
//
//   logit = bias(softcap(scale * score)),  prob = exp(logit - logsumexp),  weight = dropout(prob)
//
// where bias adds ALiBi's slope and the mask, and hides columns outside the band
// i + first <= j <= i + last. A row without visible columns has weights 0 and logsumexp -inf.
//
//   forward   scores -> weights, logsumexp
//   backward  grad (of the weights), and either probs (given_probs) or scores and logsumexp
//             -> grad_scores; without given_probs also the weights again
//   dropout   scores (then: probs) -> weights
//
// An output may alias the input of the same shape: each thread reads an element before it writes
// it.
#pragma once

#include "../common/score_params.h"

namespace torch_cubin {

// SoftmaxParams::mask_kind: none, bytes (0 adds -inf), or numbers that are added.
constexpr int kMaskNone = 0;
constexpr int kMaskBool = 1;
constexpr int kMaskFloat16 = 2;
constexpr int kMaskBFloat16 = 3;
constexpr int kMaskFloat32 = 4;
constexpr int kMaskFloat64 = 5;

struct SoftmaxParams {
  const void* scores;
  const void* probs;  // backward with given_probs: before dropout
  void* weights;      // written unless null
  void* logsumexp;    // Real, one a row; forward: written unless null
  const void* grad;
  void* grad_scores;
  const void* delta;           // sum over j of prob * grad of prob, one a row; null: computed
  const void* grad_logsumexp;  // one a row, or null
  const void* mask;
  TC_SCORE_TENSORS(TC_SCORE_POINTER)
  tc_int64 mask_stride[4];  // batch, head, row, column; in elements
  tc_int64 alibi_stride;
  tc_int64 rows;                              // batch * heads * seqlen_q
#define TC_SCORE_DOUBLE(name) tc_int64 name;  // the bits of a double
  TC_SCORE_NUMBERS(TC_SCORE_DOUBLE)
#undef TC_SCORE_DOUBLE
  int heads, seqlen_q, seqlen_k;
  int first, last;            // of the band; very large or small if it is open
  int all_heads, first_head;  // dropout's head is first_head + batch * all_heads + head
  int drop_below;             // a 16-bit random number below this drops; 0: no dropout
  int mask_kind;
  int given_probs;
};

}  // namespace torch_cubin
