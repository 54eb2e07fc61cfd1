// Sums over the rows of a matrix, in parts; column_sums_params.h defines the computation. The order
// of the additions depends on the sizes, and on whether a cluster adds up the parts.
//
// Adjacent blocks have the parts of the columns of eight adjacent threads: those of a cluster.
// A block reads kRows rows at a time, and each thread has up to eight vectors in flight.
#include "cluster_columns.cuh"
#include "column_sums_params.h"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS, kDtype = static_cast<int>(DType::TC_DTYPE);
constexpr int kRows = kBlock / kThreadsAcross;  // at once

template <class Access>
TC_DEVICE void sum_columns(const ColumnSumsParams& p) {
  using Raw = typename Access::Raw;
  constexpr int kElements = Access::kElements, kHeld = sizeof(Raw) > 16 ? 4 : 8;
  const ClusterColumns<kBlock, 1, kElements> columns(p.joins ? p.parts : 1);
  const int part = static_cast<int>(blockIdx.x % p.parts);
  const int first_column = static_cast<int>(blockIdx.x / p.parts) * columns.kColumns;
  const int column = first_column + static_cast<int>(threadIdx.x) % kThreadsAcross * kElements;
  const bool valid = column < p.columns;
  const tc_int64 size = (p.rows + p.parts - 1) / p.parts, begin = size * part;
  const tc_int64 end = min(begin + size, p.rows);
  float sums[1][kElements] = {};
  // Addresses first: few rows take a tenth less time so (2048 x 768, H200: 2.87 -> 2.61 us).
  const tc_int64 own_row = begin + threadIdx.x / kThreadsAcross;
  const tc_int64 step = p.x_stride * (kRows * (kDtype == kRowFloat32 ? 4 : 2));  // bytes
  const char* at = RowOf(p.x, own_row * p.x_stride + column, kDtype).data;
  const RowOf out(p.out, static_cast<tc_int64>(p.joins ? 0 : part) * p.columns, p.out_dtype);
  wait_for_previous_kernel();
#pragma unroll 1
  for (tc_int64 first = own_row; valid && first < end; first += kHeld * kRows) {
    Raw raw[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (first + i * kRows >= end) break;
      Access::load_raw(raw[i], RowOf(at + i * step, 0, kDtype), 0);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (first + i * kRows >= end) break;
      float x[kElements];
      Access::unpack(x, raw[i]);
#pragma unroll
      for (int j = 0; j < kElements; ++j) sums[0][j] += x[j];
    }
    at += kHeld * step;
  }
  columns.join(sums, [&](int, int own, const float (&sum)[1]) {
    if (first_column + own < p.columns) {
      Singles<kRowFloat32>::store(out, sum, first_column + own);
    }
  });
}

extern "C" __global__ void __launch_bounds__(kBlock)
    TC_KERNEL(const __grid_constant__ ColumnSumsParams p) {
  with_access<ReadVectors, DType::TC_DTYPE>(p.columns,
                                            [&](auto access) { sum_columns<decltype(access)>(p); });
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"kernels": [
  {"name": "column_sums_rows_{d.short}", "kind": "column_sums", "math": "float32", "alignment": 2,
   "tile": [32, 64, 1], "block": [256, 1, 1], "cost": {"k_tile": 0, "fixed": 0},
   "defines": {"TC_DTYPE": "{d.dtype}"}, "for": {"d": "f16 bf16 f32"}}]}
*/
