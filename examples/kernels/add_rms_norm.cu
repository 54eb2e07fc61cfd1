// hidden = x + residual; out = hidden * rstd * weight, rstd = 1 / sqrt(mean(hidden^2) + eps) of
// each row. One block a row of n elements; sums in float32.
//
//   nvcc -cubin -arch=sm_90a add_rms_norm.cu -o add_rms_norm.sm_90a.cubin
#include "rms_norm.cuh"

template <class T, int kSize>
__device__ void add_rms_norm(const T* x, const T* residual, const T* weight, T* out, T* hidden,
                             float* rstd, int n, float eps) {
  const size_t row = static_cast<size_t>(blockIdx.x) * n;
  const int first = threadIdx.x * kSize, step = blockDim.x * kSize;
  Vector<T, kSize> kept;  // most rows have one vector a thread: it need not be read again
  float sum = 0;
  for (long long i = first; i < n; i += step) {
    const auto a = load<T, kSize>(x + row + i), b = load<T, kSize>(residual + row + i);
    Vector<T, kSize> h;
    for (int j = 0; j < kSize; ++j) {
      h.at[j] = static_cast<T>(static_cast<float>(a.at[j]) + static_cast<float>(b.at[j]));
      const auto rounded = static_cast<float>(h.at[j]);
      sum += rounded * rounded;
    }
    store(hidden + row + i, h);
    if (i == first) kept = h;
  }
  const float r = rsqrtf(block_sum(sum) / n + eps);
  for (long long i = first; i < n; i += step) {
    const auto h = i == first ? kept : load<T, kSize>(hidden + row + i);
    const auto w = load<T, kSize>(weight + i);
    Vector<T, kSize> o;
    for (int j = 0; j < kSize; ++j) {
      o.at[j] = static_cast<T>(static_cast<float>(h.at[j]) * r * static_cast<float>(w.at[j]));
    }
    store(out + row + i, o);
  }
  if (threadIdx.x == 0) rstd[blockIdx.x] = r;
}

#define KERNEL(NAME, T, SIZE)                                                                \
  extern "C" __global__ void __launch_bounds__(1024)                                         \
      add_rms_norm_##NAME(const T* x, const T* residual, const T* weight, T* out, T* hidden, \
                          float* rstd, int n, float eps) {                                   \
    add_rms_norm<T, SIZE>(x, residual, weight, out, hidden, rstd, n, eps);                   \
  }
FOR_EACH_DTYPE(KERNEL)
