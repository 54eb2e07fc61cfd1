// Sums over the last dimension; sum_params.h defines the computation. Of deviations the mean is
// subtracted before squares are added, so that a large mean takes no digits away. The mean is that
// of differences from the row's first element, exact for rows of one value.
//
// Each block takes as many rows as it holds, or each cluster of blocks one row.
#include "rows.cuh"
#include "sum_params.h"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS, kDtype = static_cast<int>(DType::TC_DTYPE);

template <class Access>
TC_DEVICE void sum_row(const RowSumParams& p) {
  using Own = Lane<Access>;
  RowJoin<Sums<1>, kBlock> join(p.threads, p.cluster);
  const auto [row, valid] = OwnRow(p.rows, p.threads, p.cluster);
  const Own at(p.threads, p.cluster, p.columns);
  const RowOf x_row(p.x, row * p.x_stride, p.x_dtype);
  typename Own::Raw raw[Own::kHeld];
  const auto load = [&](int first) { at.load(raw, x_row, first); };
  // The sum of the row's terms.
  const auto total_of = [&](auto&& term) {
    Sums<1> total = {{0}};
    at.for_each_unpacked(raw, load, [&](float (&x)[Access::kElements], int) {
#pragma unroll
      for (int j = 0; j < Access::kElements; ++j) x[j] = term(x[j]);
      total.of[0] += sum_of(x);
    });
    join(total, Sums<1>::Join{});
    return total.of[0];
  };
  const auto plain = [](float element) { return element; };
  const auto square = [](float element) { return element * element; };
  load(0);
  float total;
  if (p.kind == kRowSum) {
    total = total_of(plain);
  } else if (p.kind == kRowSquares) {
    total = total_of(square);
  } else {
    const float first =
        at.first_element(raw, [&, row = row] { return element_of(p.x, kDtype, row * p.x_stride); });
    const float shift = total_of([&](float element) { return element - first; });
    const float mean = first + shift / static_cast<float>(p.columns);
    total = total_of([&](float element) { return square(element - mean); });
  }
  if (valid && at.lane == 0) {
    const float out[1] = {total / p.divisor};
    Singles<kDtype>::store(RowOf(p.out, row, p.out_dtype), out, 0);
  }
}

extern "C" __global__ void __launch_bounds__(kBlock, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ RowSumParams p) {
  wait_for_previous_kernel();
  with_held_access<DType::TC_DTYPE>(p.threads, p.cluster, p.columns,
                                    [&](auto access) { sum_row<decltype(access)>(p); });
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"kernels": [
  {"name": "sum_rows_{d.short}_{size.threads}", "kind": "sum", "math": "float32", "alignment": 2,
   "tile": [1, 8, 1], "block": ["{size.threads}", 1, 1], "cost": {"k_tile": 0, "fixed": 0},
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": "{size.blocks}"},
   "for": {"d": "f16 bf16 f32", "size": [{"threads": 256, "blocks": 5}]}}]}
*/
