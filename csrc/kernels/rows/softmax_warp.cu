// softmax.cu for rows by vectors of 16 bits that lanes of a warp hold (warp_rows.cuh).
#include "exponential.cuh"
#include "softmax_params.h"
#include "warp_rows.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr int kDtype = static_cast<int>(DType::TC_DTYPE);
constexpr int kRows = TC_TILE_M, kVectors = TC_TILE_N / (32 * kRowVector);

template <int kLanes, bool kLog>
TC_DEVICE void softmax(const RowsSoftmaxParams& p) {
  using Rows = WarpRows<kDtype, TC_THREADS, kLanes, kRows, kVectors, TC_UNSURE>;
  using Access = typename Rows::Access;
  constexpr int kElements = Rows::kElements;
  const Rows rows(p.rows, p.columns);
  typename Rows::Raw raw[kRows][kVectors];
  const auto x_at = rows.places(p.x, p.x_stride);
  wait_for_previous_kernel();
  rows.load(raw, x_at);
  float max[kRows], total[kRows] = {};
#pragma unroll
  for (float& each : max) each = -kInfinity;
  rows.for_each([&](int r, int i) {
    if (rows.has(i)) max[r] = fmaxf(max[r], Access::max_of(raw[r][i]));
  });
  rows.join(max, [](float a, float b) { return fmaxf(a, b); });
  float x[kRows][kVectors][kElements];  // of softmax, exponentials
  rows.for_each([&](int r, int i) {
    const float shift = max[r] == -kInfinity ? 0.0f : max[r];
    float sum = 0;
    Access::unpack(x[r][i], raw[r][i]);
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      const float term = exponential<false>(x[r][i][j] - shift);
      if (!kLog) x[r][i][j] = term;
      sum += term;
    }
    if (rows.has(i)) total[r] += sum;
  });
  rows.sum(total);
  float last[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) last[r] = kLog ? logf(total[r]) : 1.0f / total[r];
  rows.for_each([&](int r, int i) {
    if (!rows.has_row(r) || !rows.has(i)) return;
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      x[r][i][j] = kLog ? x[r][i][j] - max[r] - last[r] : x[r][i][j] * last[r];
    }
    Access::store(RowOf(p.out, rows.row(r) * p.columns, p.out_dtype), x[r][i], rows.column(i));
  });
}

template <bool kLog>
TC_DEVICE void softmax(const RowsSoftmaxParams& p) {
  with_lanes<kVectors>(p.threads, [&](auto lanes) { softmax<decltype(lanes)::value, kLog>(p); });
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ RowsSoftmaxParams p) {
  p.log ? softmax<true>(p) : softmax<false>(p);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": [90],
 "kernels": [
  {"name": "softmax_warp_rows_{d.short}_{size.columns}", "kind": "softmax_warp", "math": "float32",
   "tile": ["{size.rows}", "{size.columns}", 1], "block": [128, 1, 1], "archs": ["sm_90a"],
   "cost": {"k_tile": 0, "fixed": 0},
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": "{size.blocks}", "TC_UNSURE": "{size.unsure}"},
   "for": {
    "d": "f16 bf16",
    "size": [
     ["columns", "rows", "blocks", "unsure"],
     [ 256, 2, 10, 1],
     [ 512, 1, 10, 1],
     [1024, 1,  6, 2]]}}]}
*/
