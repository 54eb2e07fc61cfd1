// The exponentials of softmax.
#pragma once

#include <limits>

#include "common/ptx.cuh"

namespace torch_cubin {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// x = exp(x - shift). Not `exact`: with a relative error of 2^-22 and another 2^-24 for each unit
// of the exponent, at a third of expf's instructions.
template <bool kExact, int kElements>
TC_DEVICE void exponentials(float (&x)[kElements], float shift) {
#pragma unroll
  for (int j = 0; j < kElements; ++j) {
    x[j] -= shift;
    x[j] = kExact ? expf(x[j]) : exp2_approx(x[j] * kLog2E);
  }
}

}  // namespace torch_cubin
