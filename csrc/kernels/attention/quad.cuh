// Exchanges within a quad: the four lanes 4 g to 4 g + 3 that share the rows of an accumulator
// tile, for mma.sync and wgmma alike. Every lane of the warp must take part.
#pragma once

#include "common/ptx.cuh"

namespace torch_cubin {

TC_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

TC_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// word[n] of lane t becomes word[t] of lane n, within each quad: afterwards a lane has all of the
// quad's elements of one n8 tile, 8 columns in order.
TC_DEVICE void quad_transpose(u32 (&word)[4]) {
  int t = threadIdx.x % 4;
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    bool upper = t & bit;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n & bit) continue;
      u32 keep = upper ? word[n | bit] : word[n];
      u32 give = upper ? word[n] : word[n | bit];
      u32 got = __shfl_xor_sync(~0u, give, bit);
      word[n] = upper ? got : keep;
      word[n | bit] = upper ? keep : got;
    }
  }
}

}  // namespace torch_cubin
