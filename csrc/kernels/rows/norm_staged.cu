// norm.cu for rows by vectors that a block's shared memory holds (staged.cuh): see norm_row.cuh.
#include "norm_row.cuh"
#include "staged.cuh"

namespace torch_cubin::TC_KERNEL {

using Row = StagedRow<DType::TC_DTYPE, kNormCalls, 0>;

extern "C" __global__ void __launch_bounds__(TC_THREADS, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ NormParams p) {
  with_staged_row<Row>(
      p, {{p.x, p.x_stride}, {p.residual, p.residual_stride}}, [&] { prefetch_parameters(p); },
      [&](const Row& row) { normalize_row(p, row); });
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": [90],
 "kernels": [
  {"name": "norm_staged_rows_{d.short}", "kind": "norm_staged", "math": "float32",
   "tile": [1, 8, 1], "block": [512, 1, 1], "archs": ["sm_90a"], "cost": {"k_tile": 0, "fixed": 0},
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": 3}, "for": {"d": "f16 bf16"}}]}
*/
