// The sum of each token's rows of experts by their weights. sum_params.h defines the result.
//
// All threads do the same: each has 16 bytes of an output row, or one element where rows are no
// multiples of 16 bytes. Bound by memory bandwidth.
#include "sum_params.h"
#include "vectors.cuh"
#include "weights.cuh"

namespace torch_cubin::TC_KERNEL {

using Elements = RowElements<DType::TC_DTYPE>;

// Adds up the rows of a token, `kElements` columns from `column` on.
template <int kElements>
TC_DEVICE void add_rows(const ExpertSumParams& p, tc_int64 token, int column) {
  float sum[kElements] = {};
#pragma unroll 2
  for (int j = 0; j < p.k; ++j) {
    const tc_int64 at = token * p.k + j, place = p.places[at];
    const bool exists = place >= 0 && place < p.row_count;
    const float weight = exists ? read_weight(p.weights, p.weights_type, at) : 0.0f;
    float own[kElements] = {};
    if (exists) Elements::load(p.rows, place * p.columns + column, own);
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum[i] = __fmaf_rn(weight, own[i], sum[i]);
  }
  Elements::store(p.out, token * p.columns + column, sum);
}

extern "C" __global__ void __launch_bounds__(TC_THREADS)
    TC_KERNEL(const __grid_constant__ ExpertSumParams p) {
  wait_for_previous_kernel();
  const tc_int64 unit = static_cast<tc_int64>(blockIdx.x) * TC_THREADS + threadIdx.x;
  const int in_row = p.columns / p.elements;
  const tc_int64 token = unit / in_row;
  if (token >= p.tokens) return;
  const int column = static_cast<int>(unit - token * in_row) * p.elements;
  if (p.elements == 1) {
    add_rows<1>(p, token, column);
  } else {
    add_rows<Elements::kVector>(p, token, column);
  }
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sum_experts_{d.short}", "kind": "sum", "archs": ["sm_90a"], "dtype": "{d.dtype}",
   "math": "{d.dtype}", "layout": "any", "alignment": 16, "tile": [1, "{d.columns}", 1], "stages": 1,
   "block": [256, 1, 1], "dynamic_shared": 0, "defines": {"TC_DTYPE": "{d.dtype}"}, "cost": {},
   "for": {"d": [{"short": "f16", "dtype": "float16", "columns": 2048},
                 {"short": "bf16", "dtype": "bfloat16", "columns": 2048},
                 {"short": "f32", "dtype": "float32", "columns": 1024}]}}]}
*/
