// The derivative of softmax and log-softmax; softmax_params.h defines the computation.
//
// A block takes as many rows at a time as fit; any grid.x is correct.
#include "exponential.cuh"
#include "rows.cuh"
#include "softmax_params.h"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS, kStages = TC_STAGES;

template <class Access>
TC_DEVICE void differentiate(const RowsSoftmaxParams& p) {
  constexpr int kElements = Access::kElements;
  const Lane<Access> at(p.threads, p.columns);
  const Stages<Access, kBlock> stages(2, p.resident, p.x_dtype);
  const auto y_of = [&](tc_int64 row) { return RowOf(p.x, row * p.x_stride, p.x_dtype); };
  const auto grad_of = [&](tc_int64 row) {
    return RowOf(p.grad_out, row * p.grad_out_stride, p.x_dtype);
  };
  const auto copy = [&](tc_int64 row, int stage) {
    stages.copy(stage, 0, y_of(row), at);
    stages.copy(stage, 1, grad_of(row), at);
  };
  for_each_row<kBlock, kStages>(p.rows, p.threads, copy, [&](tc_int64 row, int stage, bool valid) {
    const RowOf out(p.out, row * p.columns, p.out_dtype);
    const RowOf y_row = y_of(row), grad_row = grad_of(row);
    float sum = 0;
    if (valid) {
      at.for_each([&](int i, int column) {
        float y[kElements], grad[kElements];
        stages.get(grad, stage, 1, grad_row, i, column);
        if (!p.log) {
          stages.get(y, stage, 0, y_row, i, column);
#pragma unroll
          for (int j = 0; j < kElements; ++j) grad[j] *= y[j];
        }
#pragma unroll
        for (int j = 0; j < kElements; ++j) sum += grad[j];
      });
    }
    sum = join_row<kBlock>(sum, p.threads, Add{});
    if (!valid) return;
    at.for_each([&](int i, int column) {
      float y[kElements], grad[kElements];
      stages.get(y, stage, 0, y_row, i, column);
      stages.get(grad, stage, 1, grad_row, i, column);
      if (p.log) exponentials<Access::kExact>(y, 0.0f);
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        grad[j] = p.log ? grad[j] - y[j] * sum : y[j] * (grad[j] - sum);
      }
      Access::store(out, grad, column);
    });
  });
}

extern "C" __global__ void __launch_bounds__(kBlock, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ RowsSoftmaxParams p) {
  wait_for_previous_kernel();
  with_access(p.columns, p.x_dtype, [&](auto access) { differentiate<decltype(access)>(p); });
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": [80, 90],
 "kernels": [
  {"name": "softmax_backward_rows", "kind": "softmax_backward", "dtype": "any", "math": "float32",
   "layout": "any", "alignment": 2, "tile": [1, 8, 1], "stages": 2, "block": [512, 1, 1],
   "dynamic_shared": 0, "defines": {"TC_BLOCKS": 2}, "blocks": 2,
   "cost": {"k_tile": 0, "fixed": 0}}]}
*/
