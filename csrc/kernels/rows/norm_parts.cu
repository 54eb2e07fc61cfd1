// The gradients of weight and bias of layer norm and RMS norm: sums over the parts of the rows that
// norm_backward_sums.cu or norm_columns.cu have summed, rounded. Their order depends on the sizes
// alone.
//
// Block (x, y): a few columns of sums_w, or in the last y of sums_b, whose parts its threads load
// all at a time where there are no more than norm_backward_sums.cu leaves.
#include "norm_params.h"
#include "rows.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS, kAcross = kThreadsAcross, kHeld = 5;
constexpr int kLeastDiscarded = 1024, kLine = 128;              // columns, bytes
constexpr int kApart = kBlock / kAcross, kWarps = kBlock / 32;  // parts at a time

// Leaves what a line of the L2 cache holds undefined.
TC_DEVICE void discard_line(const void* line) {
#if __CUDA_ARCH__ >= 800
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory");
#endif
}

// kElements: of a thread in each part.
template <int kElements>
TC_DEVICE void add_parts(const NormParams& p) {
  struct alignas(4 * kElements) Vector {
    float of[kElements];
  };
  constexpr int kColumns = kAcross * kElements;  // of a block
  __shared__ Vector of_warps[kWarps][kAcross];
  const bool is_bias = p.sums_w == nullptr || blockIdx.y > 0;
  const float* const sums = (is_bias ? p.sums_b : p.sums_w) + blockIdx.x * kColumns;
  const int own = threadIdx.x / kAcross, across = threadIdx.x % kAcross;
  const bool valid = static_cast<int>(blockIdx.x * kColumns) + across * kElements < p.columns;
  const int element = static_cast<int>(blockIdx.x * kColumns + threadIdx.x);
  const bool writes = threadIdx.x < kColumns && element < p.columns;
  const auto part_of = [&](int part) { return sums + static_cast<tc_int64>(part) * p.columns; };
  Vector total = {};
  float sum[1];
  // Joins zeros before the previous kernel has ended, which brings the instructions near.
#pragma unroll 1
  for (bool loaded = false;; loaded = true) {
#pragma unroll
    for (int lanes = kAcross; lanes < 32; lanes *= 2) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) total.of[j] += __shfl_xor_sync(~0u, total.of[j], lanes);
    }
    if (threadIdx.x % 32 < kAcross) of_warps[threadIdx.x / 32][across] = total;
    __syncthreads();
    const float* const of_warp = of_warps[0][0].of + threadIdx.x % kColumns;
    sum[0] = of_warp[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) sum[0] += of_warp[warp * kColumns];
    if (loaded) break;
    __syncthreads();
    wait_for_previous_kernel();
#pragma unroll 1
    for (int first = own; valid && first < p.sums_parts; first += kHeld * kApart) {
      Vector x[kHeld];
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int part = first + i * kApart;
        x[i] = {};
        if (part >= p.sums_parts) continue;
        x[i] = reinterpret_cast<const Vector*>(part_of(part))[across];
      }
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
#pragma unroll
        for (int j = 0; j < kElements; ++j) total.of[j] += x[i].of[j];
      }
    }
  }
  wait_for_previous_grid();  // once more, for all paths: it has ended
  if (writes) {
    const RowOf gradient(is_bias ? p.grad_bias : p.grad_weight, 0,
                         is_bias ? p.bias_dtype : p.weight_dtype);
    Singles<kRowFloat32>::store(gradient, sum, element);
  }
  // The parts are read no more: their lines need not be written to memory (layer norm of
  // 8192 x 4096, H200: 57.5 -> 56.0 us; of few columns the instructions take longer).
  if (p.columns < kLeastDiscarded || p.columns % kColumns != 0 || kColumns * 4 != kLine) return;
  for (int part = threadIdx.x; part < p.sums_parts; part += kBlock) discard_line(part_of(part));
}

extern "C" __global__ void __launch_bounds__(kBlock)
    TC_KERNEL(const __grid_constant__ NormParams p) {
  p.columns % kPartsVector == 0 ? add_parts<kPartsVector>(p) : add_parts<1>(p);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"kernels": [
  {"name": "norm_parts_rows_f32", "kind": "norm_parts", "dtype": "float32", "math": "float32",
   "alignment": 4, "tile": [64, 32, 1], "block": [512, 1, 1], "cost": {"k_tile": 0, "fixed": 0}}]}
*/
