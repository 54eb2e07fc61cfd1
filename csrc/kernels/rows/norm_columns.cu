// Sums over parts of the rows for the gradients of weight and bias of layer norm and RMS norm,
// where norm_backward_sums.cu does not make them; norm_parts.cu adds the parts. The order of the
// sums depends on the sizes alone.
//
// Block (x, y): part y of the columns of eight adjacent threads, of which a warp has four rows at a
// time.
#include "columns.cuh"
#include "norm_params.h"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS;
constexpr int kRows = kBlock / kThreadsAcross;  // at once

template <class Access>
TC_DEVICE void sum_columns(const NormParams& p) {
  constexpr int kElements = Access::kElements;
  const int own = threadIdx.x / kThreadsAcross;
  const int column =
      static_cast<int>(blockIdx.x * kThreadsAcross + threadIdx.x % kThreadsAcross) * kElements;
  const bool valid = column < p.columns;
  float of_weight[kElements] = {}, of_bias[kElements] = {};
  float x[kElements], grad[kElements];
  const tc_int64 size = (p.rows + p.parts - 1) / p.parts, begin = size * blockIdx.y;
  const tc_int64 end = min(begin + size, p.rows);
#pragma unroll 2
  for (tc_int64 row = begin + own; valid && row < end; row += kRows) {
    Access::load(x, RowOf(p.x, row * p.x_stride, p.row_dtype), column);
    Access::load(grad, RowOf(p.grad_out, row * p.grad_out_stride, p.row_dtype), column);
    const float mean = p.centered ? p.mean[row] : 0.0f, rstd = p.rstd[row];
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      of_weight[j] += grad[j] * ((x[j] - mean) * rstd);
      of_bias[j] += grad[j];
    }
  }
  const auto write = [&](float (&sums)[kElements], float* parts) {
    if (parts == nullptr) return;  // for all threads
    join_rows<kRows>(sums);
    __syncthreads();  // before the next sums
    if (own > 0 || !valid) return;
    Access::store(RowOf(parts, static_cast<tc_int64>(blockIdx.y) * p.columns, kRowFloat32), sums,
                  column);
  };
  write(of_weight, p.sums_w);
  write(of_bias, p.sums_b);
}

extern "C" __global__ void __launch_bounds__(kBlock)
    TC_KERNEL(const __grid_constant__ NormParams p) {
  wait_for_previous_kernel();
  with_access<Vectors, DType::TC_DTYPE>(p.columns,
                                        [&](auto access) { sum_columns<decltype(access)>(p); });
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"kernels": [
  {"name": "norm_columns_rows_{d.short}", "kind": "norm_columns", "math": "float32", "alignment": 2,
   "tile": [64, 64, 1], "block": [512, 1, 1], "cost": {"k_tile": 0, "fixed": 0},
   "defines": {"TC_DTYPE": "{d.dtype}"}, "for": {"d": "f16 bf16 f32"}}]}
*/
