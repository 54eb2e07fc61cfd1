// Scales a tensor in place; scale_params.h defines the computation. A factor of one, that of most
// losses' gradients, costs no memory traffic.
#include "rows.cuh"
#include "scale_params.h"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS;

template <class Access>
TC_DEVICE void scale(const ScaleParams& p, float factor) {
  constexpr int kElements = Access::kElements;
  const tc_int64 step = static_cast<tc_int64>(gridDim.x) * (kBlock * kElements);
  tc_int64 first = (static_cast<tc_int64>(blockIdx.x) * kBlock + threadIdx.x) * kElements;
#pragma unroll 4
  for (; first < p.count; first += step) {
    const RowOf at(p.x, first, p.x_dtype);
    float x[kElements];
    Access::load(x, at, 0);
#pragma unroll
    for (int j = 0; j < kElements; ++j) x[j] *= factor;
    Access::store_own(at, x, 0);
  }
}

extern "C" __global__ void __launch_bounds__(kBlock)
    TC_KERNEL(const __grid_constant__ ScaleParams p) {
  wait_for_previous_kernel();
  const float factor = element_of(p.factor, p.factor_dtype, 0);
  if (factor == 1.0f) return;
  if (p.vectors) {
    scale<Vectors<static_cast<int>(DType::TC_DTYPE)>>(p, factor);
  } else {
    scale<Singles<static_cast<int>(DType::TC_DTYPE)>>(p, factor);
  }
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"kernels": [
  {"name": "scale_rows_{d.short}", "kind": "scale", "math": "float32", "alignment": 2,
   "tile": [1, 8, 1], "block": [256, 1, 1], "cost": {"k_tile": 0, "fixed": 0},
   "defines": {"TC_DTYPE": "{d.dtype}"}, "for": {"d": "f16 bf16 f32"}}]}
*/
