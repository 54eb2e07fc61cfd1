// The running softmax of sm90/forward.cu: two rows a thread (16w + g and 8 below), scores in
// wgmma's layout.
//
// The reference of a row's exponentials is the maximum of the row's first block of keys. Later
// maxima are not computed: weights use the same reference, and only if a thread's sum of them
// exceeds kMost is anything done. If the sum is below kFar, weights, sums and outputs are divided
// by a power of two and the reference moves by its exponent, which rounds nothing. Beyond that, the
// scores are computed once more and their maximum becomes the reference.
//
// A maximum in every block would cost a tenth of the instructions, at the head of the chain that
// the next product waits for. Weights up to kMost are safe in float16 too.
//
// A warp votes on whether anything is to be done. Each row then follows its own scores, and factors
// of other rows are exactly 1: a row's bits do not depend on the rows beside it.
#pragma once

#include "approximate.cuh"
#include "attention/numbers.cuh"
#include "attention/quad.cuh"
#include "common/ptx.cuh"

namespace torch_cubin {
namespace sm90 {

constexpr float kMost = 4096.0f;
constexpr float kFar = 1.2676506e30f;  // 2^100, whose inverse is also a normal number
// Weights of 128 scores that are above the reference by this sum to less than kFar.
constexpr float kNear = 90.0f;
// References above it are subtracted from the scores before multiplying: in one fma with a product
// of their size the result would be all rounding.
constexpr float kHuge = 1048576.0f;

// Of numbers far from the limits of float32, without the function that ptxas calls for others.
TC_DEVICE float divide(float a, float b) {
  float inverse = reciprocal_approx(b), quotient = a * inverse;
  return fmaf(fmaf(-quotient, b, a), inverse, quotient);
}

// kMoves: something is added to the scores, ALiBi or a mask, so that logits may grow from block to
// block. If one block's maximum was needed, those of the row's other blocks in the tile are
// computed too, so that scores are not computed twice each time. kRows: 1 if only the first of the
// thread's two rows exists; the elements of the other one are then neither read nor written.
template <bool kMoves, int kRows = 2>
struct RunningSoftmax {
  float reference[2];  // in powers of two; kLowest until a block with scores has been seen
  float sum[2];        // this thread's part
  // Two bits each for the rows, the same in a quad: whether a row wants the next block's maximum;
  // whether it wants that of all later blocks (kMoves); whether the maximum of this block was
  // found.
  u32 state;
  bool looks;             // whether a row of the warp wants a maximum
  using Sums = float[2];  // of a block's weights in this thread

  TC_DEVICE void reset() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      reference[h] = kLowest;
      sum[h] = 0.0f;
    }
    state = kWants;
    looks = true;
  }

  // The first block's scores to weights.
  template <int kCount>
  TC_DEVICE void weigh_first(float (&s)[kCount], float unit) {
    float factor[2], block[2];
    find_maximum(s, unit, factor);
    exponentiate(s, unit, block);
    state &= ~kFound;
    sum[0] = block[0];
    sum[1] = block[1];
  }

  // Scores to weights. Returns false if the scores are needed once more. `moves`: previous outputs
  // must be multiplied by `factor`. Both are uniform in a warp. `factor` is left unchanged if no
  // score was seen yet.
  template <int kCount>
  TC_DEVICE bool weigh(float (&s)[kCount], float unit, float (&factor)[2], bool& moves) {
    float block[2];
    moves = looks;
    if (__builtin_expect(moves, 0)) find_maximum(s, unit, factor);
    exponentiate(s, unit, block);
    if (__builtin_expect(!are_small(block), 0)) {
      u32 found = (state & kFound) / kFound1;
      u32 far = rows_above(block, kFar) & ~found;
      if (__any_sync(~0u, far != 0)) {
        // Of rows whose maximum was found, it is found again: for NaN there is no other end.
        state |= far | found | (kMoves ? far * kGrows1 : 0);
        looks = true;
        return false;
      }
      step_down(s, block, factor, rows_above(block, kMost) & ~found);
      moves = true;
    }
    if (__builtin_expect(moves, 0)) state &= ~kFound;
    sum[0] += block[0];
    sum[1] += block[1];
    return true;
  }

  // What weigh_small() compares sums of weights with: no sum is small where a maximum is wanted.
  TC_DEVICE float limit() const { return looks ? -1.0f : kMost; }

  // weigh() in two parts, where no maximum is wanted: first this, which is all if it returns true.
  template <int kCount>
  TC_DEVICE bool weigh_small(float (&s)[kCount], float unit, float limit, float (&block)[2]) {
    exponentiate(s, unit, block);
    if (!are_small(block, limit)) return false;
    sum[0] += block[0];
    sum[1] += block[1];
    return true;
  }
  template <int kCount>
  TC_DEVICE bool weigh_large(float (&s)[kCount], float (&block)[2], float (&factor)[2]) {
    if (looks) return false;
    u32 far = rows_above(block, kFar);
    if (__any_sync(~0u, far != 0)) {
      state |= far | (kMoves ? far * kGrows1 : 0);
      looks = true;
      return false;
    }
    step_down(s, block, factor, rows_above(block, kMost));
    sum[0] += block[0];
    sum[1] += block[1];
    return true;
  }

  // Whether weigh() will not need these scores once more, judged by the largest. Uniform in a warp.
  // NaN is not near: it is larger than any sum that weigh() allows.
  template <int kCount>
  TC_DEVICE bool are_near(const float (&s)[kCount], float unit) const {
    bool near = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = s[2 * h];
#pragma unroll
      for (int i = 1; i < kCount / 2; ++i) top = maximum_or_nan(top, s[i / 2 * 4 + 2 * h + i % 2]);
      near &= fmaf(top, unit, -reference[h]) <= kNear;
    }
    return __all_sync(~0u, near);
  }

  // Adds a score that has no value, in natural units, the same for both rows; -inf changes nothing.
  TC_DEVICE void join(float score, float (&total)[2], float (&factor)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float moved = fmaxf(reference[h], score * kLog2e);
      factor[h] = exp2_approx(reference[h] - moved);
      total[h] = total[h] * factor[h] + exp2_approx(fmaf(score, kLog2e, -moved));
      reference[h] = moved;
    }
  }

 private:
  static constexpr u32 kWants = 3, kGrows1 = 4, kFound1 = 16, kFound = 3 * kFound1;

  static TC_DEVICE bool are_small(const float (&block)[2], float limit = kMost) {
    return __all_sync(~0u, block[0] <= limit && block[1] <= limit);
  }

  // The bits of the rows of which a thread's sum of weights is above the limit, or NaN.
  static TC_DEVICE u32 rows_above(const float (&block)[2], float limit) {
    u32 quad = 15u << threadIdx.x % 32 / 4 * 4, rows = 0;
#pragma unroll
    for (int h = 0; h < kRows; ++h) {
      rows |= (__ballot_sync(~0u, !(block[h] <= limit)) & quad) != 0 ? 1u << h : 0u;
    }
    return rows;
  }

  template <int kCount>
  TC_DEVICE void exponentiate(float (&s)[kCount], float unit, float (&block)[2]) const {
    float part[2][2] = {};
    float minus[2] = {state & 1 ? 0.0f : -reference[0], state & 2 ? 0.0f : -reference[1]};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      int h = i / 2 % 2;
      if (h >= kRows) continue;
      s[i] = exp2_approx(fmaf(s[i], unit, minus[h]));
      part[h][i / 4 % 2] += s[i];
    }
    block[0] = part[0][0] + part[0][1];
    block[1] = part[1][0] + part[1][1];
  }

  template <int kCount>
  static TC_DEVICE float row_maximum(const float (&s)[kCount], int h) {
    float top = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
    for (int i = 4; i < kCount; i += 4) top = fmaxf(top, fmaxf(s[i + 2 * h], s[i + 2 * h + 1]));
    return quad_max(top);
  }

  // The references of rows that want it become the maximum of the scores, or stay if they are
  // larger. A row that still wants its maxima, because its reference is huge, has it subtracted
  // from the scores here.
  template <int kCount>
  TC_DEVICE void find_maximum(float (&s)[kCount], float unit, float (&factor)[2]) {
    float top[2], own[2], before[2];
    bool seen[2];
    u32 wanted = state & kWants, grows = kMoves ? state / kGrows1 & kWants : 0;
    state = (grows * (1 + kGrows1)) | (wanted * kFound1);
#pragma unroll
    for (int h = 0; h < kRows; ++h) {
      float found = row_maximum(s, h);
      top[h] = fmaxf(found, kLowest);
      own[h] = top[h] * unit;
      seen[h] = top[h] > kLowest;
      if constexpr (kMoves) {
        // Models also hide keys by adding -FLT_MAX, which overflows in powers of two.
        own[h] = fmaxf(own[h], kLeast);
        seen[h] = found > -kInfinity;
      }
      before[h] = reference[h];
      float scaled = fmaxf(before[h], seen[h] && wanted >> h & 1 ? own[h] : before[h]);
      float step = before[h] != kLowest ? exp2_approx(before[h] - scaled) : 1.0f;
      factor[h] *= step;
      sum[h] *= step;
      reference[h] = scaled;
      if (!(fabsf(scaled) <= kHuge)) state |= 1u << h;
    }
    looks = __any_sync(~0u, (state & kWants) != 0);
    if (!looks) return;
#pragma unroll
    for (int h = 0; h < kRows; ++h) {
      // A reference that stays belongs to an earlier block, whose scores are gone. Rounded, it must
      // not be less than the largest score, or weights could be infinite.
      bool stays = seen[h] && own[h] < before[h];
      float raw = stays ? fmaxf(divide(before[h], unit), top[h]) : top[h];
      if (!(state >> h & 1)) raw = 0.0f;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i / 2 % 2 == h) s[i] -= raw;
      }
    }
  }

  // Divides the rows' weights of this block, and earlier sums, by the power of two in the largest
  // weight. A row whose reference becomes huge wants its maxima from here on: so it does not matter
  // whether another row of the warp looks.
  template <int kCount>
  TC_DEVICE void step_down(float (&s)[kCount], float (&block)[2], float (&factor)[2], u32 rows) {
#pragma unroll
    for (int h = 0; h < kRows; ++h) {
      int exponent = max((__float_as_int(row_maximum(s, h)) >> 23) - 127, 0);
      if (!(rows >> h & 1)) exponent = 0;
      float step = __int_as_float((127 - exponent) << 23);
      factor[h] *= step;
      reference[h] += static_cast<float>(exponent);
      block[h] *= step;
      sum[h] *= step;
      if (!(fabsf(reference[h]) <= kHuge)) state |= 1u << h;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i / 2 % 2 == h) s[i] *= step;
      }
    }
    looks = __any_sync(~0u, (state & kWants) != 0);
  }
};

// The bits of a word of Sm90MaskTiles whose keys are at most `last`, counted from the word's first:
// of the even and of the odd bits, every eighth key each.
TC_DEVICE u32 bits_up_to(int last) {
  u32 count = max(((last + 8) >> 3) + ((last + 7) >> 3), 0), bit;
  asm("shl.b32 %0, 1, %1;" : "=r"(bit) : "r"(count));  // 0 from 32 on
  return bit - 1;
}

// Sets elements without a bit to `value`. One row after the other, so that one instruction moves
// seven bits into predicates.
template <int kCount>
TC_DEVICE void replace_where_clear(float (&s)[kCount], const u32 (&bits)[2], float value) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int i = 2 * h; i < kCount; i += 4) {
      if (!(bits[h] >> (i / 4 * 2) & 1)) s[i] = value;
      if (!(bits[h] >> (i / 4 * 2 + 1) & 1)) s[i + 1] = value;
    }
  }
}

}  // namespace sm90
}  // namespace torch_cubin
