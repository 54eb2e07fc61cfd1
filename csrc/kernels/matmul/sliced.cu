// float32 products of few tiles, without tensor cores. sliced_tile.cuh says how a block computes
// its tile.
#include "sliced_tile.cuh"

namespace torch_cubin::TC_KERNEL {

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    TC_KERNEL(const __grid_constant__ MatmulParams p) {
  wait_for_previous_kernel();
  compute_tile(p);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"kernels": [
  {"name": "sliced_matmul_f32_{layout}_64x32x64", "kind": "sliced", "dtype": "float32",
   "math": "float32", "layout": "{layout}", "tile": [64, 32, 64], "block": [128, 1, 1], "stages": 3,
   "dynamic_shared": 73728, "archs": ["sm_90a"],
   "cost": {"k_tile": 4400, "fixed": 4000, "lone": 0.4},
   "defines": {"TC_LAYOUT": "{layout}", "TC_MIN_BLOCKS": 3}, "for": {"layout": ["nn", "nt"]}}]}
*/
