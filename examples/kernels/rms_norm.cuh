// Shared by both kernels of rms_norm.py: vectors of elements, and a sum over a block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// `kSize` neighbouring elements, read and written at once.
template <class T, int kSize>
struct alignas(sizeof(T) * kSize) Vector {
  T at[kSize];
};

template <class T, int kSize>
__device__ Vector<T, kSize> load(const T* from) {
  return *reinterpret_cast<const Vector<T, kSize>*>(from);
}

template <class T, int kSize>
__device__ void store(T* to, const Vector<T, kSize>& value) {
  *reinterpret_cast<Vector<T, kSize>*>(to) = value;
}

// The sum of every thread's value, in the same order at each call. Threads: a multiple of 32.
__device__ inline float block_sum(float value) {
  __shared__ float warps[32];
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  __syncthreads();  // an earlier call may still be reading
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : 0;
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// One kernel for each dtype: NAME_float32, ... read 16 bytes at once, NAME_float32_1, ... suit rows
// of any length.
#define FOR_EACH_DTYPE(KERNEL)       \
  KERNEL(float32, float, 4)          \
  KERNEL(float16, __half, 8)         \
  KERNEL(bfloat16, __nv_bfloat16, 8) \
  KERNEL(float32_1, float, 1)        \
  KERNEL(float16_1, __half, 1)       \
  KERNEL(bfloat16_1, __nv_bfloat16, 1)
