// Sums over the last dimension; sum_params.h defines the computation. Deviations read a row twice,
// the second time from the caches: the mean is subtracted before squares are added, so that a large
// mean takes no digits away.
//
// A block takes as many rows at a time as fit; any grid.x is correct.
#include "rows.cuh"
#include "sum_params.h"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS;

template <int kElements>
TC_DEVICE float sum_of(float (&x)[kElements]) {
#pragma unroll
  for (int step = kElements / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < step; ++i) x[i] += x[i + step];
  }
  return x[0];
}

// The sum of a row's terms, by all threads of the block.
template <class Access, class Term>
TC_DEVICE float row_total(const Lane<Access>& at, const RowOf& row, bool valid, Term&& term) {
  float total = 0;
  if (valid) {
    at.for_each([&](int, int column) {
      float x[Access::kElements];
      Access::load(x, row, column);
#pragma unroll
      for (int i = 0; i < Access::kElements; ++i) x[i] = term(x[i]);
      total += sum_of(x);
    });
  }
  return join_row<kBlock>(total, at.threads, Add{});
}

template <class Access>
TC_DEVICE void sum_rows(const RowSumParams& p) {
  const Lane<Access> at(p.threads, p.columns);
  const int at_once = kBlock / p.threads;
  for (tc_int64 base = static_cast<tc_int64>(blockIdx.x) * at_once; base < p.rows;
       base += static_cast<tc_int64>(gridDim.x) * at_once) {
    const tc_int64 row = base + threadIdx.x / p.threads;
    const bool valid = row < p.rows;
    const RowOf x(p.x, row * p.x_stride, p.x_dtype);
    const auto plain = [](float element) { return element; };
    const auto square = [](float element) { return element * element; };
    float total;
    if (p.kind == kRowSum) {
      total = row_total(at, x, valid, plain);
    } else if (p.kind == kRowSquares) {
      total = row_total(at, x, valid, square);
    } else {
      const float mean = row_total(at, x, valid, plain) / static_cast<float>(p.columns);
      total = row_total(at, x, valid, [&](float element) { return square(element - mean); });
    }
    if (valid && at.lane == 0) {
      const float out[1] = {total / p.divisor};
      Singles::store(RowOf(p.out, row, p.out_dtype), out, 0);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kBlock, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ RowSumParams p) {
  wait_for_previous_kernel();
  with_access(p.columns, p.x_dtype, [&](auto access) { sum_rows<decltype(access)>(p); });
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": [80, 90],
 "kernels": [
  {"name": "sum_rows", "kind": "sum", "dtype": "any", "math": "float32", "layout": "any",
   "alignment": 2, "tile": [1, 8, 1], "stages": 1, "block": [256, 1, 1], "dynamic_shared": 0,
   "defines": {"TC_BLOCKS": 4}, "blocks": 4, "cost": {"k_tile": 0, "fixed": 0}}]}
*/
