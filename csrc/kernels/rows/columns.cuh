// Blocks that sum over rows: eight adjacent threads have columns of one row, others other rows.
#pragma once

#include "rows.cuh"

namespace torch_cubin {

// Sums over the threads with the same columns, for those of the first of kRows rows: over the rows
// of each warp by shuffles, then over the warps. After it, all threads must meet before the next
// sums.
template <int kRows, int kElements>
TC_DEVICE void join_rows(float (&sums)[kElements]) {
  constexpr int kWarps = kRows * kThreadsAcross / 32;
  __shared__ __align__(16) float parts[kWarps][kThreadsAcross * kElements];
  const int first = threadIdx.x % kThreadsAcross * kElements;
#pragma unroll
  for (int lanes = kThreadsAcross; lanes < 32; lanes *= 2) {
#pragma unroll
    for (int j = 0; j < kElements; ++j) sums[j] += __shfl_xor_sync(~0u, sums[j], lanes);
  }
  if (threadIdx.x % 32 < kThreadsAcross) {
#pragma unroll
    for (int j = 0; j < kElements; ++j) parts[threadIdx.x / 32][first + j] = sums[j];
  }
  __syncthreads();
  if (threadIdx.x >= kThreadsAcross) return;
#pragma unroll 4
  for (int warp = 1; warp < kWarps; ++warp) {
#pragma unroll
    for (int j = 0; j < kElements; ++j) sums[j] += parts[warp][first + j];
  }
}

}  // namespace torch_cubin
