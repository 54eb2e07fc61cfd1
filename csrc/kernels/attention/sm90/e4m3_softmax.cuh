// The running softmax of sm90/e4m3.cu, like sm90/softmax.cuh, for weights that become e4m3: the
// largest number is 448, and values below 2^-10 become 0.
//
// So the largest weight of a row's first block of keys is 2^kLift, not 1. Later blocks' maxima are
// not computed: the sum of each 16 weights in a thread must be at most 448, which bounds each of
// them too. Beyond that, the reference moves by a power of two, which rounds nothing, but takes as
// long as a maximum: with 2^7, warps did so in nearly all of the first five blocks of normal
// scores, with 2^5 in 1 of 200. For the same reason the maximum of the block after one of which
// some keys are hidden is computed, too.
//
// A row of which few keys have most of the weight, so that its weights sum to less than 2^7, is
// multiplied by 2 or 4 in the first block without hidden keys. So n keys that are rounded to 0 have
// less than n 2^-17 of a row's sum, or n 2^-15 in the few blocks with hidden keys: with 2^5 for all
// rows, 16,384 keys of 2^-15 of one were a third of an output.
#pragma once

#include "softmax.cuh"

namespace torch_cubin {
namespace sm90 {

class E4m3Softmax {
 public:
  static constexpr float kLift = 5.0f;
  static constexpr float kLeastSum = 128.0f;
  static constexpr float kMostE4m3 = 448.0f;

  // Of two rows, in powers of two: the exponent with weight 1. kLowest until a score was seen.
  float reference[2];
  float sum[2];  // this thread's part, of unrounded weights
  bool looks;    // the next block's maximum is needed; the same in all threads of a warp
  using Sums = float[2][2];  // of a block's weights in this thread, 16 of each row

  TC_DEVICE void reset() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      reference[h] = kLowest;
      sum[h] = 0.0f;
    }
    looks = true;
  }

  // Scores to weights. Returns false if the scores are needed once more. Previous outputs must be
  // multiplied by `factor`, which is left unchanged if they need not be, or if no score was seen
  // yet. `whole`: no key of the block is hidden.
  template <int kCount>
  TC_DEVICE bool weigh(float (&s)[kCount], float unit, float (&factor)[2], bool whole) {
    Sums part;
    bool looked = looks;
    if (__builtin_expect(looks, 0)) find_maximum(s, unit, factor);
    exponentiate(s, unit, part);
    if (looked && whole && __builtin_expect(!looks, 1)) raise(s, part, factor);
    float most = largest(part);
    if (!looked && __builtin_expect(!__all_sync(~0u, most <= kMostE4m3), 0)) {
      if (!__all_sync(~0u, most <= kFar)) {
        looks = true;
        return false;
      }
      step_down(s, part, factor);
    }
    add(part);
    if (__builtin_expect(!whole, 0)) looks = true;
    return true;
  }

  // What weigh_small() compares a thread's sums of 16 weights with.
  TC_DEVICE float limit() const { return kMostE4m3; }

  // weigh() in two parts, where no maximum is wanted: first this, which is all if it returns true.
  template <int kCount>
  TC_DEVICE bool weigh_small(float (&s)[kCount], float unit, float limit, Sums& part) {
    exponentiate(s, unit, part);
    if (!__all_sync(~0u, largest(part) <= limit)) return false;
    add(part);
    return true;
  }
  template <int kCount>
  TC_DEVICE bool weigh_large(float (&s)[kCount], Sums& part, float (&factor)[2]) {
    if (looks) return false;
    if (!__all_sync(~0u, largest(part) <= kFar)) {
      looks = true;
      return false;
    }
    step_down(s, part, factor);
    add(part);
    return true;
  }

 private:
  // The maximum of NaN and a number is the number: a row with NaN is lost anyway.
  static TC_DEVICE float largest(const Sums& part) {
    return fmaxf(fmaxf(part[0][0], part[0][1]), fmaxf(part[1][0], part[1][1]));
  }

  TC_DEVICE void add(const Sums& part) {
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] += part[h][0] + part[h][1];
  }

  template <int kCount>
  TC_DEVICE void exponentiate(float (&s)[kCount], float unit, Sums& part) const {
    float minus[2] = {looks ? kLift : -reference[0], looks ? kLift : -reference[1]};
#pragma unroll
    for (int h = 0; h < 2; ++h) part[h][0] = part[h][1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      int h = i / 2 % 2;
      s[i] = exp2_approx(fmaf(s[i], unit, minus[h]));
      part[h][i / 4 % 2] += s[i];
    }
  }

  template <int kCount>
  static TC_DEVICE float row_maximum(const float (&s)[kCount], int h) {
    float top = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
    for (int i = 4; i < kCount; i += 4) top = fmaxf(top, fmaxf(s[i + 2 * h], s[i + 2 * h + 1]));
    return quad_max(top);
  }

  // From here on the maximum of the scores has weight 2^kLift, or less if a larger one came before.
  // While one of the warp's references is huge (`looks` stays true), it is subtracted from the
  // scores here.
  template <int kCount>
  TC_DEVICE void find_maximum(float (&s)[kCount], float unit, float (&factor)[2]) {
    float raw[2];
    looks = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = fmaxf(row_maximum(s, h), kLowest);
      bool seen = top > kLowest;
      float scaled = seen ? fmaf(top, unit, -kLift) : reference[h];
      // A reference that stays belongs to an earlier block, whose scores are gone.
      raw[h] = seen && scaled < reference[h] ? (reference[h] + kLift) / unit : top;
      scaled = fmaxf(reference[h], scaled);
      if (reference[h] != kLowest) factor[h] = exp2_approx(reference[h] - scaled);
      sum[h] *= reference[h] != kLowest ? factor[h] : 1.0f;
      reference[h] = scaled;
      looks |= !(fabsf(scaled) <= kHuge);
    }
    looks = __any_sync(~0u, looks);
    if (!looks) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] -= raw[i / 2 % 2];
  }

  // Multiplies the weights of rows whose sums are too small, and earlier sums, by a power of two.
  template <int kCount>
  TC_DEVICE void raise(float (&s)[kCount], Sums& part, float (&factor)[2]) {
    float by[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float total = quad_sum(sum[h] + part[h][0] + part[h][1]);
      bool is_small = total > 0.0f && total < kLeastSum;
      by[h] = !is_small ? 1.0f : total < kLeastSum / 2 ? 4.0f : 2.0f;
    }
    if (__all_sync(~0u, by[0] * by[1] == 1.0f)) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      reference[h] -= by[h] == 4.0f ? 2.0f : by[h] - 1.0f;
      factor[h] *= by[h];
      sum[h] *= by[h];
      part[h][0] *= by[h];
      part[h][1] *= by[h];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i / 2 % 2 == h) s[i] *= by[h];
      }
    }
  }

  // Divides the weights of rows whose sums are too large, and earlier sums, by a power of two that
  // leaves sums of 128 to 256.
  template <int kCount>
  TC_DEVICE void step_down(float (&s)[kCount], Sums& part, float (&factor)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = quad_max(fmaxf(part[h][0], part[h][1]));
      int exponent = top > kMostE4m3 ? (__float_as_int(top) >> 23) - 127 - 7 : 0;
      factor[h] = __int_as_float((127 - exponent) << 23);
      reference[h] += static_cast<float>(exponent);
      part[h][0] *= factor[h];
      part[h][1] *= factor[h];
      sum[h] *= factor[h];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i / 2 % 2 == h) s[i] *= factor[h];
      }
    }
  }
};

}  // namespace sm90
}  // namespace torch_cubin
