// The gate of a tile whose columns are a gate's sums and an up's.
#pragma once

#include "activation.cuh"

namespace torch_cubin {
namespace sm90 {

// sum[i] = activation(gate i) * up i. Gates are the first half of sums and ups the second, or with
// kPairs they alternate; the second half of sums stays. kShort: less code, with the same bits,
// where activations other than SiLU may take longer.
template <int kHalf, bool kShort, bool kPairs = false>
TC_DEVICE void apply_gate(float (&sum)[2 * kHalf], int activation, const ActivationCurve& curve) {
  constexpr int kStep = kPairs ? 2 : 1, kUp = kPairs ? 1 : kHalf;
  auto follow = [&](auto exponent) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float gate = sum[kStep * i];
      sum[i] = __fmul_rn(divide_by_exponential(gate, exponent(gate)), sum[kStep * i + kUp]);
    }
  };
  if (activation == kActivationSilu) {
    follow([&](float value) { return curve_exponent<0>(value, curve); });
  } else if (!kShort && activation == kActivationGeluTanh) {
    follow([&](float value) { return curve_exponent<1>(value, curve); });
  } else if (activation == kActivationGelu || (kShort && activation == kActivationGeluTanh)) {
    follow([&](float value) { return curve_exponent<5>(value, curve); });
  } else {
    const bool relu = activation == kActivationRelu;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float gate = sum[kStep * i];
      sum[i] = __fmul_rn(relu && gate < 0.0f ? 0.0f : gate, sum[kStep * i + kUp]);
    }
  }
}

}  // namespace sm90
}  // namespace torch_cubin
