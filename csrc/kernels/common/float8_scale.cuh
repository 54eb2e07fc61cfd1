// Scales of 8-bit floats, and the gate before them: what kernels that quantise have in common, so
// that their bits are the same (quantize/quantize_params.h defines them).
#pragma once

#include "dtype.cuh"

namespace torch_cubin {

// silu(gate) * up.
TC_DEVICE float gated_by_silu(float gate, float up) {
  constexpr float kLog2e = 1.44269504f;
  return __fdividef(gate, 1.0f + exp2_approx(-kLog2e * gate)) * up;
}

// The largest of a number, over kLanes neighbouring lanes.
template <int kLanes>
TC_DEVICE float largest_of_lanes(float most) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  }
  return most;
}

// The quotient of a magnitude and the largest 8-bit number, rounded to nearest: Markstein's method,
// which has no branch. Compared with the division for all magnitudes whose quotient is normal.
template <int kLargest>
TC_DEVICE float divided(float x) {
  constexpr float kInverse = 1.0f / kLargest;
  const float quotient = x * kInverse;
  return __fmaf_rn(__fmaf_rn(-float(kLargest), quotient, x), kInverse, quotient);
}

// Of a block whose largest finite magnitude is `largest`; the others are 0 for false.
TC_DEVICE float float8_scale(float largest, int e5m2, int power_of_two) {
  constexpr float kLeast = 1.17549435e-38f;  // 2^-126: its inverse is finite
  const float exact = e5m2 ? divided<57344>(largest) : divided<448>(largest);
  float scale = fmaxf(exact, kLeast);
  if (power_of_two) {
    const u32 bits = __float_as_uint(scale);
    scale = __uint_as_float((bits + 0x7FFFFF) & 0xFF800000);
  }
  return largest == 0.0f ? 1.0f : scale;
}

}  // namespace torch_cubin
