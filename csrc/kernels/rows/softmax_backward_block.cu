// softmax_backward.cu for rows by vectors of 16 bits that a block holds in registers: as many warps
// as have kVectors vectors of each thread. By plain loads, as softmax_backward_warp.cu.
#include "softmax_gradient.cuh"
#include "softmax_params.h"

namespace torch_cubin::TC_KERNEL {

constexpr int kDtype = static_cast<int>(DType::TC_DTYPE), kBlock = TC_THREADS;
constexpr int kVectors = TC_TILE_N / (kBlock * kRowVector);
using Access = Vectors<kDtype>;

// For all threads of the block, once.
TC_DEVICE float sum_of_block(float x) {
  __shared__ float of_warps[kBlock / 32];
  x = sum_of_warp(x);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  return sum_of_warp(threadIdx.x % 32 < blockDim.x / 32 ? of_warps[threadIdx.x % 32] : 0.0f);
}

template <bool kLog>
TC_DEVICE void differentiate(const RowsSoftmaxParams& p) {
  const tc_int64 row = blockIdx.x;
  const RowOf y_row(p.x, row * p.x_stride, kDtype);
  const RowOf grad_row(p.grad_out, row * p.grad_out_stride, kDtype);
  const RowOf out(p.out, row * p.columns, p.out_dtype);
  Access::Raw y_raw[kVectors], grad_raw[kVectors];
  const auto for_each = [&](auto&& body) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int column = static_cast<int>(threadIdx.x + i * blockDim.x) * kRowVector;
      if (column < p.columns) body(i, column);
    }
  };
  const auto for_each_unpacked = [&](auto&& body) {
    for_each([&](int i, int column) {
      float y[kRowVector], grad[kRowVector];
      Access::unpack(y, y_raw[i]);
      Access::unpack(grad, grad_raw[i]);
      body(y, grad, column);
    });
  };
  for_each([&](int i, int column) {
    Access::load_raw(y_raw[i], y_row, column);
    Access::load_raw(grad_raw[i], grad_row, column);
  });
  float own = 0;
  for_each_unpacked([&](float (&y)[kRowVector], float (&grad)[kRowVector], int) {
#pragma unroll
    for (int j = 0; j < kRowVector; ++j) own += softmax_gradient_term<kLog>(y[j], grad[j]);
  });
  const float total = sum_of_block(own);
  for_each_unpacked([&](float (&y)[kRowVector], float (&grad)[kRowVector], int column) {
#pragma unroll
    for (int j = 0; j < kRowVector; ++j) {
      grad[j] = softmax_gradient<kLog, false>(y[j], grad[j], total);
    }
    Access::store(out, grad, column);
  });
}

extern "C" __global__ void __launch_bounds__(kBlock, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ RowsSoftmaxParams p) {
  wait_for_previous_kernel();
  p.log ? differentiate<true>(p) : differentiate<false>(p);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": [90],
 "kernels": [
  {"name": "softmax_backward_block_rows_{d.short}_{size.columns}", "kind": "softmax_backward_block",
   "archs": ["sm_90a"], "dtype": "{d.dtype}", "math": "float32", "layout": "any", "alignment": 16,
   "tile": [1, "{size.columns}", 1], "stages": 1, "block": [512, 1, 1], "dynamic_shared": 0,
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": "{size.blocks}"},
   "cost": {"k_tile": 0, "fixed": 0},
   "for": {"d": [{"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"}],
    "size": [{"columns": 4096, "blocks": 3}, {"columns": 8192, "blocks": 3}]}}]}
*/
