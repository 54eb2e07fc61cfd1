// Softmax of long rows: the blocks of a cluster share a row, and read each other's sums out of
// their shared memory. Grid: (blocks of a cluster, rows).
//
//   nvcc -cubin -arch=sm_90a softmax.cu -o softmax.sm_90a.cubin
#include <cooperative_groups.h>

namespace cg = cooperative_groups;

struct Sum {  // of exp(x - top)
  float top, sum;
};

__device__ Sum joined(Sum a, Sum b) {
  const float top = fmaxf(a.top, b.top);
  if (top == -INFINITY) return {top, 0};
  return {top, a.sum * expf(a.top - top) + b.sum * expf(b.top - top)};
}

__device__ Sum joined_over_warp(Sum value) {
  for (int step = 16; step > 0; step /= 2) {
    value = joined(value,
                   {__shfl_xor_sync(~0u, value.top, step), __shfl_xor_sync(~0u, value.sum, step)});
  }
  return value;
}

extern "C" __global__ void softmax(const float* x, float* out, int n) {
  __shared__ Sum warps[32], mine;
  const auto cluster = cg::this_cluster();
  const size_t row = static_cast<size_t>(blockIdx.y) * n;
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;

  Sum sum = {-INFINITY, 0};
  for (long long i = first; i < n; i += step) sum = joined(sum, {x[row + i], 1});
  sum = joined_over_warp(sum);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < blockDim.x / 32; ++i) sum = joined(sum, warps[i]);
    mine = sum;
  }
  cluster.sync();  // every block's `mine` is written
  Sum all = {-INFINITY, 0};
  for (int rank = 0; rank < cluster.num_blocks(); ++rank) {
    all = joined(all, *cluster.map_shared_rank(&mine, rank));
  }
  for (long long i = first; i < n; i += step) out[row + i] = expf(x[row + i] - all.top) / all.sum;
  cluster.sync();  // no block may leave while another reads its shared memory
}
