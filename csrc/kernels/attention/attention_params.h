// The parameter of every portable kernel of the attention family, shared by host and device code.
//
//   out[b, h, i, :] = sum_j P[i, j] v[b, h / group, j, :],   P = softmax_j(bias(scale * q_i . k_j))
//
// Every tensor is [batch, head, row, column] with three strides, in elements; columns are
// contiguous, and rows of q, k, v, out and their gradients are multiples of 16 bytes from 16-byte
// aligned bases. logsumexp and delta are float [batch, head, row], contiguous. q and out have
// `heads` heads, k and v heads / group.
//
// Row i attends to column j if  i + first <= j <= i + last  and j < seqlen_k: `first` and `last`
// bound the band (causal: last = 0; a sliding window sets both; kNoBound leaves a side open). With
// kAttendBottomRight they are shifted by the sequence's seqlen_k - seqlen_q. A row that attends to
// no column gives zeros, and logsumexp -inf.
#pragma once

#include "../common/score_params.h"

namespace torch_cubin {

constexpr int kNoBound = 1 << 30;  // first = -kNoBound, last = kNoBound: no band

// AttentionParams::flags.
constexpr int kAttendBottomRight = 1;  // the band is aligned to the last row and column
constexpr int kAttendBoolMask = 2;     // mask holds bytes: 0 hides
constexpr int kAttendOwnMask = 4;      // mask holds values of q's dtype, added to the scores
constexpr int kAttendFloatMask = 8;    // mask holds floats, added to the scores
constexpr int kAttendDropout = 16;
constexpr int kAttendSinkTerms =
    32;  // portable/delta.cu only: computes a row's term of its sink's gradient

struct AttentionParams {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* logsumexp;  // of scale * q.k plus bias and mask, natural logarithm
  // With splits > 1, grid.y = splits: split s computes the columns from s * columns_per_split on,
  // and writes these instead of out and logsumexp; the combine kernel combines them in order.
  float* partial_out;        // [split][batch][head][row][head_dim_v], normalised within the split
  float* partial_logsumexp;  // [split][batch][head][row]
  const void* mask;          // null: none; strides 0 broadcast
  TC_SCORE_TENSORS(TC_SCORE_POINTER)
  const int* cu_seqlens_q;  // null, or batch + 1 row offsets of packed sequences; not validated
  const int* cu_seqlens_k;
  // Backward.
  const void* grad_out;
  const float* delta;  // sum over the columns of grad_out * out
  float* dq_sum;       // dq in float; its size and order: portable/backward_dq.cuh
  int* dq_turn;        // [batch][head][ceil(seqlen_q / 32)]: whose turn it is to add to dq_sum
  void* dq;
  void* dk;
  void* dv;
  tc_int64 q_stride[3];  // batch, head, row
  tc_int64 k_stride[3];
  tc_int64 v_stride[3];
  tc_int64 out_stride[3];
  tc_int64 grad_out_stride[3];
  tc_int64 dq_stride[3];
  tc_int64 dk_stride[3];
  tc_int64 dv_stride[3];
  tc_int64 mask_stride[4];  // batch, head, row, column
  tc_int64 alibi_stride;
  int batch, heads, group;
  int seqlen_q, seqlen_k;  // with cu_seqlens: the longest
  int total_q, total_k;    // rows of the tensors; of packed sequences logsumexp is [head][total_q]
  int head_dim, head_dim_v;
  int first, last;
  int splits, columns_per_split;  // split KV: a multiple of the tile's columns
  int flags;
  TC_SCORE_NUMBERS(TC_SCORE_FLOAT)
  int drop_below;  // dropout: a 16-bit random number below this drops the weight
};

}  // namespace torch_cubin
