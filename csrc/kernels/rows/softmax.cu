// Softmax and log-softmax over the last dimension; softmax_params.h defines the computation. Each
// thread's sum is relative to the maximum of its own elements, so that a row is read once.
//
// Each block takes as many rows as it holds, or each cluster of blocks one row.
#include "exponential.cuh"
#include "rows.cuh"
#include "softmax_params.h"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS;

template <class Access>
TC_DEVICE void softmax(const RowsSoftmaxParams& p) {
  constexpr int kElements = Access::kElements;
  // Whether threads also hold the exponentials of softmax, in place of computing them again.
  constexpr bool kHoldsExponentials = Access::kIsHeld && !Access::kExact;
  using Own = Lane<Access>;
  using Sum = ExpSum<Access::kExact>;
  const auto [row, valid] = OwnRow(p.rows, p.threads, p.cluster);
  const Own at(p.threads, p.cluster, p.columns);
  const RowOf x_row(p.x, row * p.x_stride, p.x_dtype), out(p.out, row * p.columns, p.out_dtype);
  typename Own::Raw raw[Own::kHeld];
  const auto load = [&](int first) { at.load(raw, x_row, first); };
  const auto for_each = [&](auto&& body) { at.for_each_unpacked(raw, load, body); };
  load(0);
  RowJoin<Sum, kBlock> join(p.threads, p.cluster);
  Sum sum;
  sum.clear();
  if constexpr (Access::kIsHeld) {
    at.for_each(load, [&](int i, int) { sum.max() = fmaxf(sum.max(), Access::max_of(raw[i])); });
  }
  if constexpr (kHoldsExponentials) {
    if (!p.log) {
      float held[Own::kHeld][kElements];
      at.for_each(load, [&](int i, int) {
        Access::unpack(held[i], raw[i]);
        sum.add_below_max(held[i]);
      });
      const float own_max = sum.max();
      join(sum, typename Sum::Join{});
      if (!valid) return;
      const float scale = Sum::factor(own_max, sum.max()) / sum.total();
      at.for_each(load, [&](int i, int column) {
#pragma unroll
        for (int j = 0; j < kElements; ++j) held[i][j] *= scale;
        Access::store(out, held[i], column);
      });
      return;
    }
  }
  for_each([&](float (&x)[kElements], int) {
    if constexpr (Access::kIsHeld) {
      sum.add_below_max(x);
    } else {
      sum.add(x);
    }
  });
  join(sum, typename Sum::Join{});
  const float max = sum.max(), log_sum = logf(sum.total());
  if (!valid) return;
  if (p.log) {
    for_each([&](float (&x)[kElements], int column) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) x[j] = x[j] - max - log_sum;
      Access::store(out, x, column);
    });
    return;
  }
  if constexpr (!kHoldsExponentials) {
    const float scale = 1.0f / sum.total();
    for_each([&](float (&x)[kElements], int column) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        x[j] = exponential<Access::kExact>(x[j] - max) * scale;
      }
      Access::store(out, x, column);
    });
  }
}

extern "C" __global__ void __launch_bounds__(kBlock, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ RowsSoftmaxParams p) {
  wait_for_previous_kernel();
  with_held_access<DType::TC_DTYPE>(p.threads, p.cluster, p.columns,
                                    [&](auto access) { softmax<decltype(access)>(p); });
}

}  // namespace torch_cubin::TC_KERNEL

// accepted_spill: a few registers, on GPUs that it was not tuned on.
//
// Wider blocks are for long rows, and for the GPUs that they were measured on: wheels stay small.
/* torch_cubin kernels
{"defaults": {
  "name": "softmax_rows_{d.short}_{size.threads}", "kind": "softmax", "math": "float32",
  "alignment": 2, "tile": [1, 8, 1], "block": ["{size.threads}", 1, 1], "archs": "{size.archs}",
  "cost": {"k_tile": 0, "fixed": 0},
  "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": "{size.blocks}"}},
 "kernels": [
  {"for": {
    "d": "f16 bf16",
    "size": [["threads", "blocks", "archs"], [256, 4, null], [512, 2, ["sm_90a"]]]}},
  {"accepted_spill": "{size.spill}",
   "for": {
    "d": "f32",
    "size": [
     ["threads", "blocks", "archs", "spill"],
     [256, 5, null,
      {"sm_80": 48, "sm_86": 48, "sm_89": 48, "sm_90a": 48, "sm_100a": 48, "sm_120a": 48}],
     [512, 2, ["sm_90a"], {}],
     [1024, 1, ["sm_90a"], {}]]}}]}
*/
