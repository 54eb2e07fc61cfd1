// The sum of each token's rows of experts by their weights. sum_params.h defines the result.
//
// All threads do the same: each has 8 elements of an output row, or 1 where rows are no multiples
// of 16 bytes. Bound by memory bandwidth.
#include "common/dtype.cuh"
#include "sum_params.h"
#include "weights.cuh"

namespace torch_cubin::TC_KERNEL {

using Traits = DTypeTraits<DType::TC_DTYPE>;

// The sum of `kElements` columns from `column` on of all rows of a token.
template <int kElements>
TC_DEVICE void add_rows(const ExpertSumParams& p, tc_int64 token, int column,
                        float (&sum)[kElements]) {
  const auto rows = static_cast<const u16*>(p.rows) + column;
#pragma unroll 2
  for (int j = 0; j < p.k; ++j) {
    const tc_int64 at = token * p.k + j, place = p.places[at];
    const bool exists = place >= 0 && place < p.row_count;
    const float weight = exists ? read_weight(p.weights, p.weights_type, at) : 0.0f;
    const u16* const from = rows + (exists ? place : 0) * p.columns;
    if constexpr (kElements == 1) {
      if (exists) sum[0] = __fmaf_rn(weight, Traits::load(*from), sum[0]);
    } else {
      const uint4 own = exists ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
      const u32 words[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[2 * i] = __fmaf_rn(weight, Traits::load(static_cast<u16>(words[i])), sum[2 * i]);
        sum[2 * i + 1] =
            __fmaf_rn(weight, Traits::load(static_cast<u16>(words[i] >> 16)), sum[2 * i + 1]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(TC_THREADS)
    TC_KERNEL(const __grid_constant__ ExpertSumParams p) {
  wait_for_previous_kernel();
  const tc_int64 unit = static_cast<tc_int64>(blockIdx.x) * TC_THREADS + threadIdx.x;
  const int in_row = p.columns / p.elements;
  const tc_int64 token = unit / in_row;
  if (token >= p.tokens) return;
  const int column = static_cast<int>(unit - token * in_row) * p.elements;
  u16* const out = static_cast<u16*>(p.out) + token * p.columns + column;
  if (p.elements == 1) {
    float sum[1] = {};
    add_rows(p, token, column, sum);
    *out = Traits::round(sum[0]);
    return;
  }
  float sum[8] = {};
  add_rows(p, token, column, sum);
  *reinterpret_cast<uint4*>(out) =
      make_uint4(Traits::pack(sum[0], sum[1]), Traits::pack(sum[2], sum[3]),
                 Traits::pack(sum[4], sum[5]), Traits::pack(sum[6], sum[7]));
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sum_experts_{d.short}", "kind": "sum", "archs": ["sm_90a"], "dtype": "{d.dtype}",
   "math": "{d.dtype}", "layout": "any", "alignment": 16, "tile": [1, 2048, 1], "stages": 1,
   "block": [256, 1, 1], "dynamic_shared": 0, "defines": {"TC_DTYPE": "{d.dtype}"}, "cost": {},
   "for": {"d": [{"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"}]}}]}
*/
