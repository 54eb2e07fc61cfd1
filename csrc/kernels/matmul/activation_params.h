// The activations that a product's epilogue can apply, shared by host and device code.
#pragma once

namespace torch_cubin {

enum Activation {
  kActivationNone = 0,
  kActivationRelu = 1,
  kActivationGelu = 2,  // by erf
  kActivationGeluTanh = 3,
  kActivationSilu = 4,
};

// An activation other than ReLU, for results that are rounded to 16 bits: x / (1 + exp2(x * P(t)))
// with t = min(x * x, limit) and P(t) = c[0] + c[1] * t + ... + c[5] * t^5. Exact for SiLU and tanh
// GELU. For erf GELU, P is fitted to log2(1 / Phi(x) - 1) / x: the error of x * Phi(x) is at most
// 1.2e-6, and relative to results above 1e-3 at most 1.7e-4 (tests/unit/test_activation_curve.py).
struct ActivationCurve {
  float limit;
  float c[6];
};

constexpr ActivationCurve kActivationCurves[] = {
    {0.0f, {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}},
    {0.0f, {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}},
    {25.0f,
     {-2.3021474843e+00f, -1.0497950155e-01f, 1.9332104737e-04f, 1.3107785330e-04f,
      -7.6395720827e-06f, 1.5126349793e-07f}},
    {1e30f, {-2.3022081986787f, -0.10294323960391f, 0.0f, 0.0f, 0.0f, 0.0f}},
    {1e30f, {-1.4426950408890f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}},
};

}  // namespace torch_cubin
