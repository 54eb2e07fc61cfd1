// Results of pairs of columns, which a lane has in wgmma's layout: a gate's sum and an up's.
#pragma once

#include "common/ptx.cuh"

namespace torch_cubin {
namespace sm90 {

// Of each 8 results a lane has, for both of its rows, those of columns q and 4 + q, where q is its
// number in its quad. Exchanges them within quads, so that each lane has the columns 2q and 2q + 1,
// as in wgmma's layout. Each lane sends one of two columns at a time: lanes of even number the
// first one, while those of odd number send the second.
template <int kHalf>
TC_DEVICE void exchange_pairs(float (&sum)[2 * kHalf]) {
  const int lane = threadIdx.x % 32;
  const bool odd = lane & 1, high = lane & 2;
  const int even_source = (lane & ~3) + 2 * (lane & 1);
  const int first_source = even_source + (high ? 1 : 0);
#pragma unroll
  for (int b = 0; b < kHalf / 4; ++b) {
    float* const x = sum + 4 * b;  // column q of both rows, then 4 + q
    float first[2], second[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      first[row] = __shfl_sync(~0u, odd ? x[2 + row] : x[row], first_source);
      second[row] = __shfl_sync(~0u, odd ? x[row] : x[2 + row], first_source ^ 1);
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      x[2 * row] = high ? second[row] : first[row];
      x[2 * row + 1] = high ? first[row] : second[row];
    }
  }
}

}  // namespace sm90
}  // namespace torch_cubin
