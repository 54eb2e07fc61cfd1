// The activations on the device. All kernels that apply one include this file, and no operation
// here may be contracted with another one, so that all kernels round identically, as
// batch-invariant products need.
#pragma once

#include "activation_params.h"
#include "common/ptx.cuh"

namespace torch_cubin {

TC_DEVICE float reciprocal(float x) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// x * P(t) of a curve whose coefficients above c[kDegree] are zero. Every sufficient degree gives
// the same bits.
template <int kDegree>
TC_DEVICE float curve_exponent(float x, const ActivationCurve& curve) {
  float sum = curve.c[kDegree];
  if constexpr (kDegree > 0) {
    float t = fminf(__fmul_rn(x, x), curve.limit);
#pragma unroll
    for (int i = kDegree - 1; i >= 0; --i) sum = __fmaf_rn(sum, t, curve.c[i]);
  }
  return __fmul_rn(x, sum);
}

// x / (1 + 2^exponent), for results that are rounded to 16 bits afterwards. Correct for infinities.
TC_DEVICE float divide_by_exponential(float x, float exponent) {
  return __fmul_rn(x, reciprocal(__fadd_rn(1.0f, exp2_approx(exponent))));
}

// kExact: for results that stay float32, whose last bits the fast instructions get wrong.
template <bool kExact>
TC_DEVICE float activate(float x, int activation, const ActivationCurve& curve) {
  if (activation == kActivationNone) return x;
  if (activation == kActivationRelu) return x < 0.0f ? 0.0f : x;  // NaN stays NaN
  if constexpr (!kExact) return divide_by_exponential(x, curve_exponent<5>(x, curve));
  if (activation == kActivationGelu) {
    return __fmul_rn(__fmul_rn(0.5f, x), __fadd_rn(1.0f, erff(__fmul_rn(0.70710678118654752f, x))));
  }
  float y = x;
  if (activation == kActivationGeluTanh) {
    // 0.5 * (1 + tanh(u)) = sigmoid(2 * u)
    float cube = __fmul_rn(__fmul_rn(x, x), x);
    y = __fmul_rn(2.0f, __fmul_rn(0.79788456080286536f, __fmaf_rn(0.044715f, cube, x)));
  }
  return __fdiv_rn(x, __fadd_rn(1.0f, expf(-y)));
}

template <bool kExact>
TC_DEVICE double activate(double x, int activation, const ActivationCurve&) {
  switch (activation) {
    case kActivationRelu:
      return x < 0.0 ? 0.0 : x;
    case kActivationGelu:
      return 0.5 * x * (1.0 + erf(0.70710678118654752440 * x));
    case kActivationGeluTanh:
      return x / (1.0 + exp(-2.0 * 0.79788456080286535588 * (x + 0.044715 * x * x * x)));
    case kActivationSilu:
      return x / (1.0 + exp(-x));
    default:
      return x;
  }
}

}  // namespace torch_cubin
