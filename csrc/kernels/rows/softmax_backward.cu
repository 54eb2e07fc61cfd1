// The derivative of softmax and log-softmax; softmax_params.h defines the computation.
//
// Each block takes as many rows as it holds, or each cluster of blocks one row.
#include "rows.cuh"
#include "softmax_gradient.cuh"
#include "softmax_params.h"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS;

template <class Access>
TC_DEVICE void differentiate(const RowsSoftmaxParams& p) {
  constexpr int kElements = Access::kElements;
  using Own = Lane<Access>;
  const auto [row, valid] = OwnRow(p.rows, p.threads, p.cluster);
  const Own at(p.threads, p.cluster, p.columns);
  const RowOf y_row(p.x, row * p.x_stride, p.x_dtype), out(p.out, row * p.columns, p.out_dtype);
  const RowOf grad_row(p.grad_out, row * p.grad_out_stride, p.x_dtype);
  typename Own::Raw y_raw[Own::kHeld], grad_raw[Own::kHeld];
  const auto load = [&](int first) {
    at.load(grad_raw, grad_row, first);
    at.load(y_raw, y_row, first);
  };
  const auto for_each = [&](auto&& body) {
    at.for_each(load, [&](int i, int column) {
      float y[kElements], grad[kElements];
      Access::unpack(y, y_raw[i]);
      Access::unpack(grad, grad_raw[i]);
      body(y, grad, column);
    });
  };
  load(0);
  RowJoin<Sums<1>, kBlock> join(p.threads, p.cluster);
  Sums<1> sum = {{0}};
  for_each([&](float (&y)[kElements], float (&grad)[kElements], int) {
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      sum.of[0] += p.log ? softmax_gradient_term<true>(y[j], grad[j])
                         : softmax_gradient_term<false>(y[j], grad[j]);
    }
  });
  join(sum, Sums<1>::Join{});
  if (!valid) return;
  const float total = sum.of[0];
  const auto write = [&](auto log) {
    for_each([&](float (&y)[kElements], float (&grad)[kElements], int column) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        grad[j] = softmax_gradient<decltype(log)::value != 0, Access::kExact>(y[j], grad[j], total);
      }
      Access::store(out, grad, column);
    });
  };
  p.log ? write(Constant<1>{}) : write(Constant<0>{});
}

extern "C" __global__ void __launch_bounds__(kBlock, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ RowsSoftmaxParams p) {
  wait_for_previous_kernel();
  with_held_access<DType::TC_DTYPE>(p.threads, p.cluster, p.columns,
                                    [&](auto access) { differentiate<decltype(access)>(p); });
}

}  // namespace torch_cubin::TC_KERNEL

// accepted_spill: of GPUs that it was not tuned on.
//
// Wider blocks are for long rows, and for the GPUs that they were measured on: wheels stay small.
/* torch_cubin kernels
{"defaults": {
  "name": "softmax_backward_rows_{d.short}_{size.threads}", "kind": "softmax_backward",
  "alignment": 2, "tile": [1, 8, 1], "block": ["{size.threads}", 1, 1],
  "cost": {"k_tile": 0, "fixed": 0},
  "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": "{size.blocks}"}},
 "kernels": [
  {"math": "float32", "archs": "{size.archs}", "accepted_spill": "{size.spill}",
   "for": {
    "d": "f16 bf16 f32",
    "size": [
     ["threads", "blocks", "archs", "spill"],
     [256, 4, [],         {"sm_100a": 320, "sm_120a": 320}],
     [512, 2, ["sm_90a"], {}]]}},
  {"archs": ["sm_90a"], "for": {"d": "f32", "size": [{"threads": 1024, "blocks": 1}]}}]}
*/
