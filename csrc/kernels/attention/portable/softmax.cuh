// The running softmax of the forward kernels, over tiles of scores in registers.
//
// The reference of the exponentials is not the maximum itself but at most kSlack below it: it
// moves, and sums and outputs are rescaled, only if some score of the warp exceeds it by more. That
// keeps shuffles and rescaling out of nearly all tiles; weights up to 2^kSlack are safe in float16
// too.
//
// Scores and references are in units of `unit` powers of two: raw q . k in `full` kernels, where it
// is scale * log2(e); natural logits in `general` ones, where it is log2(e) and a mask of -FLT_MAX
// is not yet -inf. The reference is subtracted before multiplying: one FFMA of both would leave the
// rounding of its product in the exponent, 2^-24 of the score, which for scores of 2^32 and more
// exceeds the range of an exponent.
#pragma once

#include "attention/quad.cuh"
#include "tile.cuh"

namespace torch_cubin {

constexpr float kSlack = 8.0f;  // log2

// Moves the references if a score of this warp requires it.
template <int kBlocks, int kTiles, int kOutTiles>
TC_DEVICE void follow_maximum(const float (&score)[kBlocks][kTiles][4],
                              float (&out)[kBlocks][kOutTiles][4], float (&sum)[kBlocks][2],
                              float (&reference)[kBlocks][2], float unit) {
  float most[kBlocks][2];
  bool exceeds = false;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      most[b][h] = fmaxf(score[b][0][2 * h], score[b][0][2 * h + 1]);
#pragma unroll
      for (int n = 1; n < kTiles; ++n) {
        most[b][h] = fmaxf(most[b][h], fmaxf(score[b][n][2 * h], score[b][n][2 * h + 1]));
      }
      exceeds |= (most[b][h] - reference[b][h]) * unit > kSlack;
    }
  if (!__any_sync(~0u, exceeds)) return;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float moved = fmaxf(reference[b][h], quad_max(most[b][h]));
      float factor = exp2_approx((reference[b][h] - moved) * unit);
      reference[b][h] = moved;
      sum[b][h] *= factor;
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
        out[b][n][2 * h] *= factor;
        out[b][n][2 * h + 1] *= factor;
      }
    }
}

// Scores of n8 tile n to weights, and this lane's part of their sums.
template <int kBlocks, int kTiles>
TC_DEVICE void exponentiate(float (&score)[kBlocks][kTiles][4], float (&sum)[kBlocks][2],
                            const float (&reference)[kBlocks][2], int n, float unit) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float weight = exp2_approx((score[b][n][e] - reference[b][e / 2]) * unit);
      score[b][n][e] = weight;
      sum[b][e / 2] += weight;
    }
}

}  // namespace torch_cubin
