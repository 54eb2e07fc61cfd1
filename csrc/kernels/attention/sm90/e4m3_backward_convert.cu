// The last kernel of attention's backward for e4m3 on Hopper: sm90/backward_convert.cuh, with
// factors of heads and rows.
#include "backward_convert.cuh"
#include "e4m3_backward_numbers.cuh"

namespace torch_cubin {
namespace sm90 {

// DqScale with factors of heads and rows.
struct E4m3DqScale {
  float2 factors;

  TC_DEVICE E4m3DqScale(const Sm90E4m3BackwardParams& p, const QueryTile& of, tc_int64 first) {
    int head = of.head / p.group;
    float factor = p.scale * (1 << kE4m3WeightShift) *
                   descale_of_head(p.k_descale, of.batch, head) *
                   descale_of_head(p.v_descale, of.batch, head);
    float2 rows = __ldg(reinterpret_cast<const float2*>(p.row_factors + first) + threadIdx.x % 4);
    factors = make_float2(factor * rows.x, factor * rows.y);
  }
  TC_DEVICE float operator()(int second) const { return second == 0 ? factors.x : factors.y; }
};

}  // namespace sm90

namespace TC_KERNEL {

extern "C" __global__ void __launch_bounds__(TC_THREADS)
    TC_KERNEL(const __grid_constant__ Sm90E4m3BackwardParams p) {
  sm90::convert<DType::bfloat16, TC_THREADS, sm90::E4m3DqScale>(p);
}

}  // namespace TC_KERNEL
}  // namespace torch_cubin
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sm90_e4m3_backward_convert_attention", "kind": "convert", "dtype": "float8_e4m3fn",
   "math": "bfloat16", "tile": [8, 64, 1], "block": [256, 1, 1],
   "cost": {"k_tile": 0, "fixed": 0}}]}
*/
