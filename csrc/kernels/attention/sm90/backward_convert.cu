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
  {"name": "sm90_backward_convert_attention_{d.short}", "archs": ["sm_90a"],
   "for": {"d": [{"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"}]},
   "defines": {"TC_DTYPE": "{d.dtype}"},
   "kind": "convert", "dtype": "{d.dtype}", "math": "{d.dtype}", "layout": "any",
   "alignment": 16, "tile": [8, 64, 1], "stages": 1, "block": [256, 1, 1], "dynamic_shared": 0,
   "cost": {"k_tile": 0, "fixed": 0}}]}
*/
