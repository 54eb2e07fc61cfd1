// softmax_backward.cu for rows by vectors of 16 bits that a block holds in registers: see
// block_row.cuh.
#include "block_row.cuh"
#include "softmax_gradient.cuh"
#include "softmax_params.h"

namespace torch_cubin::TC_KERNEL {

constexpr int kVectors = TC_TILE_N / (TC_THREADS * kRowVector);
using Row = BlockRow<static_cast<int>(DType::TC_DTYPE), TC_THREADS, kVectors, 2, 1>;
using Access = Row::Access;

template <bool kLog>
TC_DEVICE void differentiate(const RowsSoftmaxParams& p, const Row& row) {
  const auto for_each = [&](auto&& body) {
    row.for_each([&](int i, int column) {
      float y[kRowVector], grad[kRowVector];
      Access::unpack(y, row.held[0][i]);
      Access::unpack(grad, row.held[1][i]);
      body(y, grad, column);
    });
  };
  float own = 0;
  for_each([&](float (&y)[kRowVector], float (&grad)[kRowVector], int) {
#pragma unroll
    for (int j = 0; j < kRowVector; ++j) own += softmax_gradient_term<kLog>(y[j], grad[j]);
  });
  const float total = row.sum(own, 0);
  const RowOf out = row.result(p.out, p.columns, p.out_dtype);
  for_each([&](float (&y)[kRowVector], float (&grad)[kRowVector], int column) {
#pragma unroll
    for (int j = 0; j < kRowVector; ++j) {
      grad[j] = softmax_gradient<kLog, false>(y[j], grad[j], total);
    }
    Access::store(out, grad, column);
  });
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ RowsSoftmaxParams p) {
  __shared__ Row::Shared shared;
  wait_for_previous_kernel();
  Row row(shared, p.columns);
  row.load(0, p.x, p.x_stride);
  row.load(1, p.grad_out, p.grad_out_stride);
  p.log ? differentiate<true>(p, row) : differentiate<false>(p, row);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": [90],
 "kernels": [
  {"name": "softmax_backward_block_rows_{d.short}_{size.columns}", "kind": "softmax_backward_block",
   "math": "float32", "tile": [1, "{size.columns}", 1], "block": [512, 1, 1], "archs": ["sm_90a"],
   "cost": {"k_tile": 0, "fixed": 0}, "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": 3},
   "for": {"d": "f16 bf16", "size": [{"columns": 4096}, {"columns": 8192}]}}]}
*/
