// The rule from scores to logits of the `general` kernels on Hopper, by common/score_rule.cuh:
// scale, softcap and ALiBi of a thread's elements of one head's queries and one block of keys.
// Masks are applied afterwards.
//
// A thread's elements are two rows (8 apart) of an accumulator and pairs of its columns. `down` is
// 0 or 1, `across` counts columns from the thread's first. In the forward rows are queries and
// columns keys, in the backward it is the reverse.
#pragma once

#include "approximate.cuh"
#include "attention/numbers.cuh"
#include "common/score_rule.cuh"
#include "sequence.cuh"

namespace torch_cubin {
namespace sm90 {

template <bool kKeysDown>
class TileRule : public RuleOf<const Sm90ScoreRule&> {
 public:
  // The thread's first element is (query, key). `slope`: ALiBi's, 0 for none.
  TC_DEVICE TileRule(const Sm90ScoreRule& p, const Sm90Sequence& s, int query, int key, float slope)
      : RuleOf<const Sm90ScoreRule&>{p}, slope_(slope) {
    distance_ = static_cast<float>(query + s.columns - s.rows - key);
  }

  TC_DEVICE bool has_mask() const { return false; }

  // NOTE: the error is up to 2^-22, which is 2^-16 of a softcap of 64: far below the rounding of
  // 16-bit types. The host passes softcaps up to 128; larger ones and float32 need the longer
  // formula of portable/score.cuh.
  TC_DEVICE float cap_tanh(float score) const {
    float e = exp2_approx(score * (2.0f * kLog2e / cap()));
    return fmaf(-2.0f, reciprocal_approx(e + 1.0f), 1.0f);
  }

  TC_DEVICE float alibi(float score, int down, int across) const {
    float moved = distance_ + (kKeysDown ? across - 8 * down : 8 * down - across);
    return fmaf(-slope_, fabsf(moved), score);
  }

  TC_DEVICE float masked(float score, int, int) const { return score; }

 private:
  float slope_, distance_;
};

// The scores of two rows, in wgmma's layout, to logits by scale and softcap. Four keys of a row
// have one reciprocal, of the product of their denominators: 9 functions of the special units
// for 12. The error is up to 2^-21, of a softcap of 64 2^-15. Of NaN, all four become NaN.
template <int kCount>
TC_DEVICE void cap_scores(float (&s)[kCount], const Sm90ScoreRule& p) {
  // From here on tanh is 1, and the product of four denominators finite.
  constexpr float kMostExponent = 30.0f;
  float factor = p.scale * (2.0f * kLog2e / p.softcap), cap = p.softcap, twice = -2.0f * cap;
#pragma unroll
  for (int first = 0; first < kCount; first += 8) {
#pragma unroll
    for (int h = 0; h < 4; h += 2) {
      float (&a)[2] = *reinterpret_cast<float (*)[2]>(&s[first + h]);
      float (&b)[2] = *reinterpret_cast<float (*)[2]>(&s[first + h + 4]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        a[i] = exp2_approx(minimum_or_nan(a[i] * factor, kMostExponent)) + 1.0f;
        b[i] = exp2_approx(minimum_or_nan(b[i] * factor, kMostExponent)) + 1.0f;
      }
      float both_a = a[0] * a[1], both_b = b[0] * b[1];
      float inverse = reciprocal_approx(both_a * both_b);
      float by_a = inverse * both_b, by_b = inverse * both_a;
      float of_a[2] = {by_a * a[1], by_a * a[0]}, of_b[2] = {by_b * b[1], by_b * b[0]};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        a[i] = fmaf(twice, of_a[i], cap);
        b[i] = fmaf(twice, of_b[i], cap);
      }
    }
  }
}

}  // namespace sm90
}  // namespace torch_cubin
