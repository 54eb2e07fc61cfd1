// The last kernel of attention's backward for 16-bit types on Hopper: sm90/backward_convert.cuh,
// with one scale for all of dq.
#include "backward_convert.cuh"

namespace torch_cubin::TC_KERNEL {

extern "C" __global__ void __launch_bounds__(TC_THREADS)
    TC_KERNEL(const __grid_constant__ Sm90BackwardParams p) {
  sm90::convert<DType::TC_DTYPE, TC_THREADS, sm90::DqScale, true>(p);
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sm90_backward_convert_attention_{d.short}", "kind": "convert", "tile": [8, 64, 1],
   "block": [256, 1, 1], "cost": {"k_tile": 0, "fixed": 0}, "defines": {"TC_DTYPE": "{d.dtype}"},
   "for": {"d": "f16 bf16"}}]}
*/
