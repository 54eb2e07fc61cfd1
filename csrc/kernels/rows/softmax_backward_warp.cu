// softmax_backward.cu for rows by vectors of 16 bits that lanes of a warp hold (warp_rows.cuh).
#include "softmax_gradient.cuh"
#include "softmax_params.h"
#include "warp_rows.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr int kDtype = static_cast<int>(DType::TC_DTYPE);
constexpr int kRows = TC_TILE_M, kVectors = TC_TILE_N / (32 * kRowVector);

template <int kLanes, bool kLog>
TC_DEVICE void differentiate(const RowsSoftmaxParams& p) {
  using Rows = WarpRows<kDtype, TC_THREADS, kLanes, kRows, kVectors, TC_UNSURE>;
  using Access = typename Rows::Access;
  constexpr int kElements = Rows::kElements;
  const Rows rows(p.rows, p.columns);
  typename Rows::Raw y_raw[kRows][kVectors], grad_raw[kRows][kVectors];
  const auto y_at = rows.places(p.x, p.x_stride);
  const auto grad_at = rows.places(p.grad_out, p.grad_out_stride);
  wait_for_previous_kernel();
  rows.load(y_raw, y_at);
  rows.load(grad_raw, grad_at);
  float total[kRows] = {};
  rows.for_each([&](int r, int i) {
    float y[kElements], grad[kElements], sum = 0;
    Access::unpack(y, y_raw[r][i]);
    Access::unpack(grad, grad_raw[r][i]);
#pragma unroll
    for (int j = 0; j < kElements; ++j) sum += softmax_gradient_term<kLog>(y[j], grad[j]);
    if (rows.has(i)) total[r] += sum;
  });
  rows.sum(total);
  rows.for_each([&](int r, int i) {
    if (!rows.has_row(r) || !rows.has(i)) return;
    float y[kElements], grad[kElements];
    Access::unpack(y, y_raw[r][i]);
    Access::unpack(grad, grad_raw[r][i]);
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      grad[j] = softmax_gradient<kLog, false>(y[j], grad[j], total[r]);
    }
    Access::store(RowOf(p.out, rows.row(r) * p.columns, p.out_dtype), grad, rows.column(i));
  });
}

template <bool kLog>
TC_DEVICE void differentiate(const RowsSoftmaxParams& p) {
  with_lanes<kVectors>(p.threads,
                       [&](auto lanes) { differentiate<decltype(lanes)::value, kLog>(p); });
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ RowsSoftmaxParams p) {
  p.log ? differentiate<true>(p) : differentiate<false>(p);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": [90],
 "kernels": [
  {"name": "softmax_backward_warp_rows_{d.short}_{size.columns}", "kind": "softmax_backward_warp",
   "math": "float32", "tile": [1, "{size.columns}", 1], "block": [128, 1, 1], "archs": ["sm_90a"],
   "cost": {"k_tile": 0, "fixed": 0},
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": "{size.blocks}", "TC_UNSURE": "{size.unsure}"},
   "for": {
    "d": "f16 bf16",
    "size": [
     ["columns", "blocks", "unsure"],
     [ 256, 12, 1],
     [ 512,  8, 1],
     [1024,  6, 2]]}}]}
*/
