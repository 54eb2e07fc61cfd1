// Functions of one instruction, beside those of common/ptx.cuh.
#pragma once

#include "common/ptx.cuh"

namespace torch_cubin {
namespace sm90 {

// For sums of weights, which are 0 or far from numbers that .ftz flushes.
TC_DEVICE float log2_approx(float x) {
  float out;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

TC_DEVICE float maximum_or_nan(float a, float b) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

TC_DEVICE float minimum_or_nan(float a, float b) {
  float out;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

TC_DEVICE float reciprocal_approx(float x) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

}  // namespace sm90
}  // namespace torch_cubin
