// Blocks that sum over rows: eight adjacent threads have columns of one row, others other rows.
#pragma once

#include "rows.cuh"

namespace torch_cubin {

// Sums over the threads with the same columns, for those of the first of kRows rows. After it, all
// threads must meet before the next sums.
template <int kRows, int kElements>
TC_DEVICE void join_rows(float (&sums)[kElements]) {
  __shared__ float parts[kRows][kThreadsAcross * kElements + 4];
  const int first = threadIdx.x % kThreadsAcross * kElements, own = threadIdx.x / kThreadsAcross;
#pragma unroll
  for (int j = 0; j < kElements; ++j) parts[own][first + j] = sums[j];
  __syncthreads();
#pragma unroll 1
  for (int half = kRows / 2; half > 0; half /= 2) {
    if (own < half) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) parts[own][first + j] += parts[own + half][first + j];
    }
    __syncthreads();
  }
#pragma unroll
  for (int j = 0; j < kElements; ++j) sums[j] = parts[own][first + j];
}

}  // namespace torch_cubin
