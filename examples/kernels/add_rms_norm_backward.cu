// The derivative of add_rms_norm.cu, whose hidden and rstd it reads. Of each row, with
// y = hidden * rstd:
//
//   grad_input = rstd * (grad_out * weight - y * mean(grad_out * weight * y)) + grad_hidden
//   grad_weight = the sum over rows of grad_out * y
//
// A block takes every gridDim.x-th row and adds up its part of grad_weight in `partial`
// (gridDim.x x n, float32), which the caller sums: the same bits at each call. Each column has one
// thread of its own.
//
//   nvcc -cubin -arch=sm_90a add_rms_norm_backward.cu -o add_rms_norm_backward.sm_90a.cubin
#include "rms_norm.cuh"

template <class T, int kSize>
__device__ void add_rms_norm_backward(const T* grad_out, const T* grad_hidden, const T* hidden,
                                      const T* weight, const float* rstd, T* grad_input,
                                      float* partial, int rows, int n) {
  const int first = threadIdx.x * kSize, step = blockDim.x * kSize;
  partial += static_cast<size_t>(blockIdx.x) * n;
  Vector<float, kSize> part = {};  // of the first columns; those of the others wait in memory
  for (int line = blockIdx.x; line < rows; line += gridDim.x) {
    const size_t row = static_cast<size_t>(line) * n;
    const float r = rstd[line];
    float sum = 0;
    for (long long i = first; i < n; i += step) {
      const auto g = load<T, kSize>(grad_out + row + i), h = load<T, kSize>(hidden + row + i);
      const auto w = load<T, kSize>(weight + i);
      for (int j = 0; j < kSize; ++j) {
        sum += static_cast<float>(g.at[j]) * static_cast<float>(w.at[j]) *
               static_cast<float>(h.at[j]) * r;
      }
    }
    const float mean = block_sum(sum) / n;
    for (long long i = first; i < n; i += step) {
      const auto g = load<T, kSize>(grad_out + row + i), h = load<T, kSize>(hidden + row + i);
      const auto w = load<T, kSize>(weight + i), more = load<T, kSize>(grad_hidden + row + i);
      Vector<T, kSize> out;
      for (int j = 0; j < kSize; ++j) {
        const auto go = static_cast<float>(g.at[j]);
        const float y = static_cast<float>(h.at[j]) * r;
        out.at[j] = static_cast<T>(r * (go * static_cast<float>(w.at[j]) - y * mean) +
                                   static_cast<float>(more.at[j]));
        if (i == first) {
          part.at[j] += go * y;
        } else {
          partial[i + j] = go * y + (line == blockIdx.x ? 0.0f : partial[i + j]);
        }
      }
      store(grad_input + row + i, out);
    }
  }
  if (first < n) {
    for (int j = 0; j < kSize; ++j) partial[first + j] = part.at[j];
  }
}

#define KERNEL(NAME, T, SIZE)                                                               \
  extern "C" __global__ void __launch_bounds__(1024) add_rms_norm_backward_##NAME(          \
      const T* grad_out, const T* grad_hidden, const T* hidden, const T* weight,            \
      const float* rstd, T* grad_input, float* partial, int rows, int n) {                  \
    add_rms_norm_backward<T, SIZE>(grad_out, grad_hidden, hidden, weight, rstd, grad_input, \
                                   partial, rows, n);                                       \
  }
FOR_EACH_DTYPE(KERNEL)
