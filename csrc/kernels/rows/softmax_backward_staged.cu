// softmax_backward.cu for rows by vectors that the shared memory of a block, or of a cluster's
// blocks, holds (staged.cuh).
#include "softmax_gradient.cuh"
#include "softmax_params.h"
#include "staged.cuh"

namespace torch_cubin::TC_KERNEL {

using Row = StagedRow<DType::TC_DTYPE, 1, 1>;
using Access = Row::Access;

template <bool kLog>
TC_DEVICE void differentiate(const Row& row, const RowOf& out) {
  const auto for_each = [&](auto&& body) {
    row.for_each([&](int i, int column) {
      Row::Raw raw;
      float y[8], grad[8];
      row.get(raw, 0, i);
      Access::unpack(y, raw);
      row.get(raw, 1, i);
      Access::unpack(grad, raw);
      body(y, grad, column);
    });
  };
  float own = 0;
  for_each([&](float (&y)[8], float (&grad)[8], int) {
#pragma unroll
    for (int j = 0; j < 8; ++j) own += softmax_gradient_term<kLog>(y[j], grad[j]);
  });
  float total = row.sum(own, 0);
  if (row.cluster > 1) {
    row.shared.of_blocks.send({total}, row.cluster);
    total = 0;
    for (int i = 0; i < row.cluster; ++i) total += row.shared.of_blocks.of[i][0];
  }
  for_each([&](float (&y)[8], float (&grad)[8], int column) {
#pragma unroll
    for (int j = 0; j < 8; ++j) grad[j] = softmax_gradient<kLog, false>(y[j], grad[j], total);
    Access::store(out, grad, column);
  });
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ RowsSoftmaxParams p) {
  with_staged_row<Row>(
      p, {{p.x, p.x_stride}, {p.grad_out, p.grad_out_stride}}, [] {},
      [&](const Row& row) {
        const RowOf out = row.result(p.out, p.columns, p.out_dtype);
        p.log ? differentiate<true>(row, out) : differentiate<false>(row, out);
      });
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": [90],
 "kernels": [
  {"name": "softmax_backward_staged_rows_{d.short}", "kind": "softmax_backward_staged",
   "math": "float32", "tile": [1, 8, 1], "block": [512, 1, 1], "archs": ["sm_90a"],
   "cost": {"k_tile": 0, "fixed": 0}, "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": 3},
   "for": {"d": "f16 bf16"}}]}
*/
