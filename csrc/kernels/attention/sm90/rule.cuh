// The rule from scores to logits of the `general` kernels on Hopper, by common/score_rule.cuh:
// scale, softcap and ALiBi of a thread's elements of one head's queries and one block of keys.
// Masks are applied afterwards.
//
// A thread's elements are two rows (8 apart) of an accumulator and pairs of its columns. `down` is
// 0 or 1, `across` counts columns from the thread's first. In the forward rows are queries and
// columns keys, in the backward it is the reverse.
#pragma once

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
    return 1.0f - __fdividef(2.0f, e + 1.0f);
  }

  TC_DEVICE float alibi(float score, int down, int across) const {
    float moved = distance_ + (kKeysDown ? across - 8 * down : 8 * down - across);
    return score - slope_ * fabsf(moved);
  }

  TC_DEVICE float masked(float score, int, int) const { return score; }

 private:
  float slope_, distance_;
};

}  // namespace sm90
}  // namespace torch_cubin
