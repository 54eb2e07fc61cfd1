// The exponentials of softmax, and sums of them.
#pragma once

#include <limits>

#include "rows.cuh"

namespace torch_cubin {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// exp(x). Not `exact`: with a relative error of 2^-22 and another 2^-24 for each unit of the
// exponent, at a third of expf's instructions.
template <bool kExact>
TC_DEVICE float exponential(float x) {
  return kExact ? expf(x) : exp2_approx(x * kLog2E);
}

// The highest of a warp's values, of which none is NaN unless all are, as integers of one order.
TC_DEVICE float max_of_warp(float x) {
  const auto ordered = [](int bits) { return bits >= 0 ? bits : bits ^ 0x7FFFFFFF; };
  return __int_as_float(ordered(__reduce_max_sync(~0u, ordered(__float_as_int(x)))));
}

// The sum of exp(x - max) over some elements. NaN propagates to the total; max is never NaN.
template <bool kExact>
struct ExpSum {
  static constexpr int kCount = 2;
  float of[kCount];

  TC_DEVICE float& max() { return of[0]; }
  TC_DEVICE float& total() { return of[1]; }
  TC_DEVICE void clear() {
    max() = -kInfinity;
    total() = 0;
  }

  // What `total` is multiplied by when the maximum rises.
  static TC_DEVICE float factor(float lower, float higher) {
    return lower == higher ? 1.0f : exponential<kExact>(lower - higher);
  }
  TC_DEVICE void raise(float higher) {
    // expf would take longer than the branch. The product is not fused with the sum that follows.
    if (kExact && !(higher > max())) return;
    const float highest = higher > max() ? higher : max();
    total() = __fmul_rn(total(), factor(max(), highest));
    max() = highest;
  }
  // The sum over the lanes of a warp.
  TC_DEVICE void join_warp() {
    const float highest = max_of_warp(max());
    total() = sum_of_warp(total() * factor(max(), highest));
    max() = highest;
  }
  // Adds elements, of which some may be -inf alone.
  template <int kElements>
  TC_DEVICE void add(const float (&x)[kElements]) {
    float highest = x[0];
#pragma unroll
    for (int j = 1; j < kElements; ++j) highest = fmaxf(highest, x[j]);
    raise(highest);
    float terms[kElements];
#pragma unroll
    for (int j = 0; j < kElements; ++j) terms[j] = x[j];
    add_below_max(terms);
  }
  // Adds elements of which none is above the maximum, and turns them into what it adds.
  template <int kElements>
  TC_DEVICE void add_below_max(float (&x)[kElements]) {
    const float shift = max() == -kInfinity ? 0.0f : max();
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      x[j] = exponential<kExact>(x[j] - shift);
      total() += x[j];
    }
  }

  struct Join {
    TC_DEVICE ExpSum operator()(ExpSum a, ExpSum b) const {
      ExpSum out;
      out.max() = fmaxf(a.max(), b.max());
      const bool first = a.max() >= b.max();
      const float lower = first ? b.total() : a.total(), higher = first ? a.total() : b.total();
      out.total() = higher + lower * factor(fminf(a.max(), b.max()), out.max());
      return out;
    }
  };
};

}  // namespace torch_cubin
