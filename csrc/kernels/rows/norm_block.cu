// norm.cu for rows by vectors that a block holds in registers (block_row.cuh): see norm_row.cuh.
#include "block_row.cuh"
#include "norm_row.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr int kVectors = TC_TILE_N / (TC_THREADS * kRowVector);
using Row = BlockRow<static_cast<int>(DType::TC_DTYPE), TC_THREADS, kVectors, 2, kNormCalls>;

extern "C" __global__ void __launch_bounds__(TC_THREADS, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ NormParams p) {
  __shared__ Row::Shared shared;
  prefetch_parameters(p);
  wait_for_previous_kernel();
  Row row(shared, p.columns);
  row.load(0, p.x, p.x_stride);
  if (p.residual != nullptr) row.load(1, p.residual, p.residual_stride);
  normalize_row(p, row);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": [90],
 "kernels": [
  {"name": "norm_block_rows_{d.short}", "kind": "norm_block", "math": "float32",
   "tile": [1, 4096, 1], "block": [256, 1, 1], "archs": ["sm_90a"],
   "cost": {"k_tile": 0, "fixed": 0}, "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": 6},
   "for": {"d": "f16 bf16"}}]}
*/
