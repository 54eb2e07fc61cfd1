// The gradient of a norm's row, whose bits are the same in all kernels that include this: which
// products are rounded before they are added is said (fmaf, __fmul_rn), not left to the compiler.
//
// With g = rstd * grad_out * weight, and totals of g * (x - mean) and of g over the row:
//
//   grad_x = g - (x - mean) * rstd^2 * total / columns - total of g / columns
#pragma once

#include "norm_params.h"
#include "rows.cuh"

namespace torch_cubin {

constexpr float kLeastSquared = 1e-16f, kMostSquared = 1e18f;

// Turns x into x - mean, and grad_out into rstd * grad_out, which between() can still read as it
// was. kCentered: of layer norm, or with the sums for a bias.
template <bool kCentered, class Between>
TC_DEVICE void scale_gradient(float& x, float& grad, float mean, float rstd, Between&& between) {
  if (kCentered) {
    x -= mean;
    between();
  }
  grad = __fmul_rn(grad, rstd);
}

// Adds an element of both, whose gradient is multiplied by the weight, to the totals.
template <bool kCentered>
TC_DEVICE void add_to_totals(Sums<kCentered ? 2 : 1>& totals, float x, float grad) {
  totals.of[0] = fmaf(grad, x, totals.of[0]);
  if constexpr (kCentered) totals.of[1] += grad;
}

// What of the totals is added to each element. `part`: 1 / columns; normalize() multiplies each
// x - mean by rstd, where rstd^2 would lose digits.
template <bool kCentered>
struct NormGradient {
  float of_x;  // of x_hat, then of x
  float shift = 0;

  template <class Normalize>
  TC_DEVICE NormGradient(const NormParams& p, const Sums<kCentered ? 2 : 1>& totals, float rstd,
                         float part, Normalize&& normalize)
      : of_x(totals.of[0] * rstd * -part) {
    if (rstd > kLeastSquared && rstd < kMostSquared) {
      of_x *= rstd;
    } else {
      normalize();
    }
    if constexpr (kCentered) shift = p.centered ? __fmul_rn(totals.of[1], -part) : 0.0f;
  }

  TC_DEVICE float operator()(float x, float grad) const {
    x = fmaf(x, of_x, grad);
    if constexpr (kCentered) x += shift;
    return x;
  }
};

}  // namespace torch_cubin
