// Softmax and log-softmax over the last dimension, the losses of cross entropy, and their gradient;
// softmax_params.h defines the computation. Each thread's sum is relative to the maximum of its own
// elements, so that a row is read once.
//
// Each block takes as many rows as it holds, or each cluster of blocks one row.
#include "exponential.cuh"
#include "rows.cuh"
#include "softmax_params.h"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

template <class Access>
TC_DEVICE void softmax(const RowsSoftmaxParams& p) {
  constexpr int kElements = Access::kElements;
  using Own = Lane<Access>;
  using Sum = ExpSum<Access::kExact>;
  RowJoin<Sum, kBlock> join(p.threads, p.cluster);
  const auto [row, valid] = OwnRow<kBlock>(p.rows, p.threads, p.cluster);
  const Own at(p.threads, p.cluster, p.columns);
  const RowOf x_row(p.x, row * p.x_stride, p.x_dtype), out(p.out, row * p.columns, p.out_dtype);
  typename Own::Raw raw[Own::kHeld];
  const auto load = [&](int first) { at.load(raw, x_row, first); };
  const auto for_each = [&](auto&& body) {
    at.for_each(load, [&](int i, int column) {
      float x[kElements];
      Access::unpack(x, raw[i]);
      body(x, column);
    });
  };
  load(0);
  const bool has_target = p.targets != nullptr;
  const tc_int64 target = has_target ? p.targets[row] : -1;
  const bool ignored = has_target && target == p.ignore_index;
  const bool is_column = target >= 0 && target < p.columns;
  const float uniform = p.label_smoothing / static_cast<float>(p.columns);
  if (p.grad_losses != nullptr) {
    if (!valid) return;
    const float max = p.max[row], log_sum = p.log_sum[row];
    const float scale = ignored ? 0.0f : is_column ? p.grad_losses[row] : kNaN;
    for_each([&](float (&x)[kElements], int column) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        x[j] = exponential<Access::kExact>(x[j] - max - log_sum) - uniform;
        if (column + j == target) x[j] -= 1.0f - p.label_smoothing;
        x[j] = ignored ? 0.0f : x[j] * scale;
      }
      Access::store(out, x, column);
    });
    return;
  }
  float x_target[1] = {0};
  if (is_column)
    Singles<static_cast<int>(DType::TC_DTYPE)>::load(x_target, x_row, static_cast<int>(target));
  Sum sum;
  sum.clear();
  for_each([&](float (&x)[kElements], int) { sum.add(x); });
  join(sum, typename Sum::Join{});
  const float max = sum.max(), log_sum = logf(sum.total());
  if (has_target) {
    float smooth = 0;
    if (uniform != 0) {
      RowJoin<Sums<1>, kBlock> join_elements(p.threads, p.cluster);
      Sums<1> elements = {{0}};
      for_each([&](float (&x)[kElements], int) {
#pragma unroll
        for (int j = 0; j < kElements; ++j) elements.of[0] += x[j];
      });
      join_elements(elements, Sums<1>::Join{});
      smooth = log_sum - (elements.of[0] / p.columns - max);
    }
    if (!valid || at.lane != 0) return;
    float loss = ignored ? 0.0f : kNaN;
    if (is_column && !ignored) {
      // Differences from the maximum come first, as in PyTorch: logsumexp would round away digits
      // of small losses.
      loss = log_sum - (x_target[0] - max);
      if (uniform != 0) loss = (1.0f - p.label_smoothing) * loss + p.label_smoothing * smooth;
    }
    p.losses[row] = loss;
    p.counted[row] = ignored ? 0.0f : 1.0f;
    p.max[row] = max;
    p.log_sum[row] = log_sum;
    return;
  }
  if (!valid) return;
  if (p.log) {
    for_each([&](float (&x)[kElements], int column) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) x[j] = x[j] - max - log_sum;
      Access::store(out, x, column);
    });
  } else {
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
  with_access<DType::TC_DTYPE>(p.threads, p.cluster, p.columns,
                               [&](auto access) { softmax<decltype(access)>(p); });
}

}  // namespace torch_cubin::TC_KERNEL

// Wider blocks are for long rows, and for the GPUs that they were measured on: wheels stay small.
/* torch_cubin kernels
{"virtual_arch": [80, 90],
 "kernels": [
  {"name": "softmax_rows_{d.short}_{size.threads}", "kind": "softmax", "dtype": "{d.dtype}",
   "math": "float32", "layout": "any", "alignment": 2, "tile": [1, 8, 1], "stages": 1,
   "block": ["{size.threads}", 1, 1], "dynamic_shared": 0,
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": "{size.blocks}"},
   "cost": {"k_tile": 0, "fixed": 0},
   "for": {"d": [
     {"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"},
     {"short": "f32", "dtype": "float32"}],
    "size": [{"threads": 256, "blocks": 4}]}},
  {"name": "softmax_rows_{d.short}_{size.threads}", "kind": "softmax", "dtype": "{d.dtype}",
   "math": "float32", "layout": "any", "alignment": 2, "tile": [1, 8, 1], "stages": 1,
   "block": ["{size.threads}", 1, 1], "dynamic_shared": 0, "archs": ["sm_90a"],
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": "{size.blocks}"},
   "cost": {"k_tile": 0, "fixed": 0},
   "for": {"d": [
     {"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"},
     {"short": "f32", "dtype": "float32"}],
    "size": [{"threads": 512, "blocks": 2}]}},
  {"name": "softmax_rows_{d.short}_{size.threads}", "kind": "softmax", "dtype": "{d.dtype}",
   "math": "float32", "layout": "any", "alignment": 2, "tile": [1, 8, 1], "stages": 1,
   "block": ["{size.threads}", 1, 1], "dynamic_shared": 0, "archs": ["sm_90a"],
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": "{size.blocks}"},
   "cost": {"k_tile": 0, "fixed": 0},
   "for": {"d": [{"short": "f32", "dtype": "float32"}],
    "size": [{"threads": 1024, "blocks": 1}]}}]}
*/
