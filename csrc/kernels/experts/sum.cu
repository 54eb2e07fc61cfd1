// The sum of each token's rows of experts by their weights. sum_params.h defines the result.
//
// All threads do the same: each has 16 bytes of an output row, or one element where rows are no
// multiples of 16 bytes. Bound by memory bandwidth.
#include "sum_params.h"
#include "vectors.cuh"
#include "weights.cuh"

namespace torch_cubin::TC_KERNEL {

using Elements = RowElements<DType::TC_DTYPE>;

// The weights of a token's places from `at` on, 0 of those that do not exist.
template <int kTogether>
TC_DEVICE void read_weights(const ExpertSumParams& p, tc_int64 at, const bool (&exists)[kTogether],
                            float (&weights)[kTogether]) {
  const auto each = [&](auto read) {
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const float own = read(exists[j] ? at + j : at);
      weights[j] = exists[j] ? own : 0.0f;
    }
  };
  if (p.weights_type == kWeightsOne) {
    each([](tc_int64) { return 1.0f; });
  } else if (p.weights_type == kWeightsFloat32) {
    each([&](tc_int64 own) { return read_weight(p.weights, kWeightsFloat32, own); });
  } else {
    each([&](tc_int64 own) { return read_weight(p.weights, p.weights_type, own); });
  }
}

// Adds up the rows of a token, `kElements` columns from `column` on, of which kTogether are loaded
// at a time. NOTE: without branches between loads, which would not be in flight together: in place
// of rows that do not exist the first one is read.
template <int kElements, int kTogether>
TC_DEVICE void add_rows(const ExpertSumParams& p, tc_int64 token, int column) {
  float sum[kElements] = {};
  for (int first = 0; first < p.k; first += kTogether) {
    const tc_int64 at = token * p.k + first;
    int places[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) places[j] = first + j < p.k ? p.places[at + j] : -1;
    bool exists[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      exists[j] = static_cast<u32>(places[j]) < static_cast<u32>(p.row_count);
    }
    float weights[kTogether], own[kTogether][kElements];
    read_weights(p, at, exists, weights);
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      Elements::load(p.rows, tc_int64{exists[j] ? places[j] : 0} * p.columns + column, own[j]);
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        sum[i] = __fmaf_rn(weights[j], exists[j] ? own[j][i] : 0.0f, sum[i]);
      }
    }
  }
  Elements::store(p.out, token * p.columns + column, sum);
}

extern "C" __global__ void __launch_bounds__(TC_THREADS)
    TC_KERNEL(const __grid_constant__ ExpertSumParams p) {
  wait_for_previous_kernel();
  const u32 in_row = p.columns / p.elements;
  tc_int64 token;
  u32 in_token;
  if (gridDim.x <= ~0u / TC_THREADS) {  // a division of 64 bits takes as long as the rows
    const u32 unit = blockIdx.x * TC_THREADS + threadIdx.x, own = unit / in_row;
    token = own;
    in_token = unit - own * in_row;
  } else {
    const tc_int64 unit = static_cast<tc_int64>(blockIdx.x) * TC_THREADS + threadIdx.x;
    token = unit / in_row;
    in_token = static_cast<u32>(unit - token * in_row);
  }
  if (token >= p.tokens) return;
  const int column = static_cast<int>(in_token) * p.elements;
  if (p.elements == 1) {
    add_rows<1, 4>(p, token, column);
  } else if (p.k == 1) {
    add_rows<Elements::kVector, 1>(p, token, column);
  } else {
    add_rows<Elements::kVector, 4>(p, token, column);
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
