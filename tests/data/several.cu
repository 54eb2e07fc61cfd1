// The kernels that tests/unit/test_cubin_parser.py reads back: every kind of parameter and every
// launch fact that a cubin records. Compiled by the test where nvcc is installed; a few of the
// cubins are committed beside this file (make_cubins.py).
#include <cstdio>

struct Three {
  int a, b, c;
};
struct alignas(64) Descriptor {
  char bytes[128];
};
struct Large {
  char bytes[4200];
};
struct Empty {};

extern "C" __global__ void vec_add(const float* x, const float* y, float* z, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) z[i] = x[i] + y[i];
}

extern "C" __global__ void structs(int i, Three three, Descriptor descriptor, float* out) {
  out[i] = three.b + descriptor.bytes[77];
}

extern "C" __global__ void small(bool flag, char c, short h, double d, Empty e, float* out) {
  if (flag) *out = c + h + d;
}

extern "C" __global__ void no_params() {}

extern "C" __global__ void __launch_bounds__(128) static_shared(float* out) {
  __shared__ float s[256];
  s[threadIdx.x] = out[0];
  s[threadIdx.x + 128] = 1;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x ^ 1];
}

extern "C" __global__ void stack(int* out, int n) {
  int a[300];  // fewer, and ptxas keeps them in registers
  for (int i = 0; i < n; ++i) a[out[i]] = i;
  out[0] = a[n];
}

template <class T>
__global__ void fill(T* out, T value) {
  *out = value;
}
template __global__ void fill<int>(int*, int);

#if __CUDA_ARCH__ >= 900
extern "C" __global__ void __cluster_dims__(2, 1, 1) cluster(float* out) { *out = 1; }
#endif

#ifdef ALL_KERNELS  // not in the committed files, which stay small

extern "C" __global__ void large(Large large, int* out, int i) { *out = large.bytes[i]; }

extern "C" __global__ void dynamic_shared(float* out) {
  extern __shared__ float s[];
  s[threadIdx.x] = out[0];
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x ^ 1];
}

extern "C" __global__ void both_shared(float* out) {
  extern __shared__ float s[];
  __shared__ float t[100];
  s[threadIdx.x] = out[0];
  t[threadIdx.x] = out[1];
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x ^ 1] + t[threadIdx.x ^ 2];
}

extern "C" __global__ void prints(int i) { printf("%d\n", i); }

__device__ __noinline__ int fibonacci(int n) {
  return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2);
}
extern "C" __global__ void recursion(int* out, int n) { *out = fibonacci(n); }

#endif
