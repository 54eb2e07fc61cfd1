// The derivative of layer norm and RMS norm; norm_params.h defines the computation. The gradients
// of weight and bias are those of norm_backward_sums.cu, norm_columns.cu and norm_parts.cu.
//
// Each block takes as many rows as it holds, or each cluster of blocks one row.
#include "norm_params.h"
#include "rows.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS;

template <class Access>
TC_DEVICE void differentiate(const NormParams& p) {
  constexpr int kElements = Access::kElements;
  using Own = Lane<Access>;
  RowJoin<Sums<2>, kBlock> join(p.threads, p.cluster);
  const float part = 1.0f / static_cast<float>(p.columns);
  const RowOf weight(p.weight, 0, p.weight_dtype);
  const auto [row, valid] = OwnRow(p.rows, p.threads, p.cluster);
  const Own at(p.threads, p.cluster, p.columns);
  const RowOf x_row(p.x, row * p.x_stride, p.row_dtype);
  const RowOf grad_row(p.grad_out, row * p.grad_out_stride, p.row_dtype);
  typename Own::Raw x_raw[Own::kHeld], grad_raw[Own::kHeld];
  const auto load = [&](int first) {
    at.load(x_raw, x_row, first);
    at.load(grad_raw, grad_row, first);
  };
  load(0);
  const float mean = p.centered ? p.mean[row] : 0.0f, rstd = p.rstd[row];
  // x_hat and grad_out * weight of a vector.
  const auto get = [&](float (&x)[kElements], float (&grad)[kElements], int i, int column) {
    Access::unpack(x, x_raw[i]);
    Access::unpack(grad, grad_raw[i]);
#pragma unroll
    for (int j = 0; j < kElements; ++j) x[j] = (x[j] - mean) * rstd;
    if (p.weight == nullptr) return;
    float factor[kElements];
    Access::load(factor, weight, column);
#pragma unroll
    for (int j = 0; j < kElements; ++j) grad[j] *= factor[j];
  };
  Sums<2> totals = {{0, 0}};
  at.for_each(load, [&](int i, int column) {
    float x[kElements], grad[kElements];
    get(x, grad, i, column);
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      totals.of[0] += grad[j] * x[j];
      totals.of[1] += grad[j];
    }
  });
  join(totals, Sums<2>::Join{});
  if (!valid) return;
  const float of_x = totals.of[0] * part;
  const float shift = p.centered ? totals.of[1] * part : 0.0f;
  const RowOf grad_sum(p.grad_sum, row * p.grad_sum_stride, p.row_dtype);
  const RowOf grad_x(p.grad_x, row * p.columns, p.row_dtype);
  at.for_each(load, [&](int i, int column) {
    float x[kElements], grad[kElements];
    get(x, grad, i, column);
#pragma unroll
    for (int j = 0; j < kElements; ++j) x[j] = rstd * (grad[j] - x[j] * of_x - shift);
    if (p.grad_sum != nullptr) {
      Access::load(grad, grad_sum, column);
#pragma unroll
      for (int j = 0; j < kElements; ++j) x[j] += grad[j];
    }
    Access::store_own(grad_x, x, column);
  });
}

extern "C" __global__ void __launch_bounds__(kBlock, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ NormParams p) {
  wait_for_previous_kernel();
  with_held_access<DType::TC_DTYPE>(p.threads, p.cluster, p.columns,
                                    [&](auto access) { differentiate<decltype(access)>(p); });
}

}  // namespace torch_cubin::TC_KERNEL

// accepted_spill: a few registers of a kernel that is bound by memory; a third block to hide its
// latency is worth more.
/* torch_cubin kernels
{"kernels": [
  {"name": "norm_backward_rows_{d.short}_{size.threads}", "kind": "norm_backward",
   "math": "float32", "alignment": 2, "tile": [1, 8, 1], "block": ["{size.threads}", 1, 1],
   "accepted_spill": "{d.spill}", "cost": {"k_tile": 0, "fixed": 0},
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": "{size.blocks}"},
   "for": {
    "d": [
     ["short", "dtype", "spill"],
     ["f16",  "float16",  {"sm_80": 96}],
     ["bf16", "bfloat16", {}],
     ["f32",  "float32",  {}]],
    "size": [{"threads": 256, "blocks": 3}]}}]}
*/
