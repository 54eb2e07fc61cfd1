// What the rule from scores to weights has in the parameters of kernels, shared by host and device
// code: the one list of its tensors and numbers, for all kernels of attention and for those of the
// softmax between its products. common/score_rule.cuh applies the rule.
#pragma once

typedef long long tc_int64;  // device code includes no <cstdint>

#ifdef __CUDACC__
#define TC_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TC_HOST_DEVICE inline
#endif

namespace torch_cubin {

// X(type, name), null where a call has none:
//   dropout_seed  on the device: one number
//   alibi_slopes  [heads] or [batch, heads], the batches `alibi_stride` (0 or heads) apart:
//                 logit -= slope * |i + seqlen_k - seqlen_q - j|
//   sinks         [heads]: a logit that joins every row's softmax, without a value
#define TC_SCORE_TENSORS(X) \
  X(tc_int64, dropout_seed) \
  X(float, alibi_slopes)    \
  X(float, sinks)

// X(name):
//   scale       of the scores
//   softcap     0: none; else score = softcap * tanh(score / softcap), before ALiBi and the mask
//   keep_scale  dropout: 1 / kept fraction
#define TC_SCORE_NUMBERS(X) X(scale) X(softcap) X(keep_scale)

// Members of a parameter.
#define TC_SCORE_POINTER(type, name) const type* name;
#define TC_SCORE_FLOAT(name) float name;

// Whether a logit is more than its score times the scale, apart from ALiBi and masks.
template <class Numbers>
TC_HOST_DEVICE bool changes_scores(const Numbers& p) {
  return p.softcap != 0;
}

template <class Params>
TC_HOST_DEVICE bool has_alibi(const Params& p) {
  return p.alibi_slopes != nullptr;
}

// Where ALiBi's slope of a head is.
template <class Params>
TC_HOST_DEVICE const float* slope_of(const Params& p, int batch, int head) {
  return p.alibi_slopes + batch * p.alibi_stride + head;
}

// Whether a logit is more than its score times the scale, apart from masks.
template <class Params>
TC_HOST_DEVICE bool has_score_rule(const Params& p) {
  return changes_scores(p) || has_alibi(p);
}

}  // namespace torch_cubin
