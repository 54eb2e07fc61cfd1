// out = x / sqrt(sum(x^2)) over the whole vector, in one launch: every block adds up its part, the
// grid waits for all of them, and every block divides. Needs a cooperative launch.
//
//   nvcc -cubin -arch=sm_90a unit_norm.cu -o unit_norm.sm_90a.cubin
#include <cooperative_groups.h>

__device__ float block_sum(float value) {
  __shared__ float warps[32];
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : 0;
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// `parts`: one float a block.
extern "C" __global__ void unit_norm(const float* x, float* out, float* parts, int n) {
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  float sum = 0;
  for (long long i = first; i < n; i += step) sum += x[i] * x[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
  cooperative_groups::this_grid().sync();
  float all = 0;
  for (int i = threadIdx.x; i < gridDim.x; i += blockDim.x) all += parts[i];
  const float scale = rsqrtf(block_sum(all));
  for (long long i = first; i < n; i += step) out[i] = x[i] * scale;
}
