// softmax.cu for rows by vectors that the shared memory of a block holds (staged.cuh). Each warp's
// sum is relative to the maximum of its own elements.
#include "exponential.cuh"
#include "softmax_params.h"
#include "staged.cuh"

namespace torch_cubin::TC_KERNEL {

using Sum = ExpSum<false>;
using Row = StagedRow<DType::TC_DTYPE, Sum::kCount, 0>;
using Access = Row::Access;

// The sum over the row. `own`: over this thread's elements, relative to its warp's maximum.
TC_DEVICE Sum join(const Row& row, Sum own) {
  own.total() = sum_of_warp(own.total());
  auto& of_warps = row.shared.of_warps;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) {
    of_warps[0][warp] = own.max();
    of_warps[1][warp] = own.total();
  }
  __syncthreads();
  Sum sum;
  sum.clear();
  if (lane < blockDim.x / 32) sum = {{of_warps[0][lane], of_warps[1][lane]}};
  sum.join_warp();
  return sum;
}

template <bool kLog>
TC_DEVICE void softmax(const Row& row, const RowOf& out) {
  const auto get = [&](float (&x)[8], int i) {
    Row::Raw raw;
    row.get(raw, 0, i);
    Access::unpack(x, raw);
  };
  Sum own;
  own.clear();
  row.for_each([&](int i, int) {
    Row::Raw raw;
    row.get(raw, 0, i);
    own.max() = fmaxf(own.max(), Access::max_of(raw));
  });
  own.max() = max_of_warp(own.max());
  row.for_each([&](int i, int) {
    float x[8];
    get(x, i);
    own.add_below_max(x);
  });
  Sum sum = join(row, own);
  const float max = sum.max(), log_sum = logf(sum.total()), scale = 1.0f / sum.total();
  row.for_each([&](int i, int column) {
    float x[8];
    get(x, i);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      x[j] = kLog ? x[j] - max - log_sum : exponential<false>(x[j] - max) * scale;
    }
    Access::store(out, x, column);
  });
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ RowsSoftmaxParams p) {
  with_staged_row<Row>(
      p, {{p.x, p.x_stride}}, [] {},
      [&](const Row& row) {
        const RowOf out = row.result(p.out, p.columns, p.out_dtype);
        p.log ? softmax<true>(row, out) : softmax<false>(row, out);
      });
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": [90],
 "kernels": [
  {"name": "softmax_staged_rows_{d.short}", "kind": "softmax_staged", "math": "float32",
   "tile": [1, 8, 1], "block": [512, 1, 1], "archs": ["sm_90a"], "cost": {"k_tile": 0, "fixed": 0},
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": 3}, "for": {"d": "f16 bf16"}}]}
*/
