// Sums over the rows of a matrix, in parts; column_sums_params.h defines the computation. The order
// of the additions depends on the sizes alone.
//
// Block (x, y): part y of the columns of eight adjacent threads. The block reads kRows rows at a
// time, and each thread has up to eight vectors in flight.
#include "column_sums_params.h"
#include "columns.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS;
constexpr int kRows = kBlock / kThreadsAcross;  // at once

template <class Access>
TC_DEVICE void sum_columns(const ColumnSumsParams& p) {
  using Raw = typename Access::Raw;
  constexpr int kElements = Access::kElements, kHeld = sizeof(Raw) > 16 ? 4 : 8;
  const int own = threadIdx.x / kThreadsAcross;
  const int column =
      static_cast<int>(blockIdx.x * kThreadsAcross + threadIdx.x % kThreadsAcross) * kElements;
  const bool valid = column < p.columns;
  const tc_int64 size = (p.rows + p.parts - 1) / p.parts, begin = size * blockIdx.y;
  const tc_int64 end = min(begin + size, p.rows);
  float sums[kElements] = {};
#pragma unroll 1
  for (tc_int64 first = begin + own; valid && first < end; first += kHeld * kRows) {
    Raw raw[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const tc_int64 row = first + i * kRows;
      if (row >= end) break;
      Access::load_raw(raw[i], RowOf(p.x, row * p.x_stride, static_cast<int>(DType::TC_DTYPE)),
                       column);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (first + i * kRows >= end) break;
      float x[kElements];
      Access::unpack(x, raw[i]);
#pragma unroll
      for (int j = 0; j < kElements; ++j) sums[j] += x[j];
    }
  }
  join_rows<kRows>(sums);
  if (own > 0 || !valid) return;
  const tc_int64 first = static_cast<tc_int64>(blockIdx.y) * p.columns;
  Access::store(RowOf(p.out, first, p.out_dtype), sums, column);
}

extern "C" __global__ void __launch_bounds__(kBlock)
    TC_KERNEL(const __grid_constant__ ColumnSumsParams p) {
  wait_for_previous_kernel();
  with_access<Vectors, DType::TC_DTYPE>(p.columns,
                                        [&](auto access) { sum_columns<decltype(access)>(p); });
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": [80, 90],
 "kernels": [
  {"name": "column_sums_rows_{d.short}", "kind": "column_sums", "dtype": "{d.dtype}",
   "math": "float32", "layout": "any", "alignment": 2, "tile": [32, 64, 1], "stages": 1,
   "block": [256, 1, 1], "dynamic_shared": 0, "defines": {"TC_DTYPE": "{d.dtype}"},
   "cost": {"k_tile": 0, "fixed": 0},
   "for": {"d": [
     {"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"},
     {"short": "f32", "dtype": "float32"}]}}]}
*/
