// The gate of a tile whose first half of columns are a gate's sums, and whose second half the up's.
#pragma once

#include "activation.cuh"

namespace torch_cubin {
namespace sm90 {

// sum[i] = activation(sum[i]) * sum[kHalf + i]; the second half stays. kShort: less code, with the
// same bits, where activations other than SiLU may take longer.
template <int kHalf, bool kShort>
TC_DEVICE void apply_gate(float (&sum)[2 * kHalf], int activation, const ActivationCurve& curve) {
  auto follow = [&](auto exponent) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      sum[i] = __fmul_rn(divide_by_exponential(sum[i], exponent(sum[i])), sum[kHalf + i]);
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
      sum[i] = __fmul_rn(relu && sum[i] < 0.0f ? 0.0f : sum[i], sum[kHalf + i]);
    }
  }
}

}  // namespace sm90
}  // namespace torch_cubin
