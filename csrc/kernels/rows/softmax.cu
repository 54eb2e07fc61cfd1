// Softmax and log-softmax over the last dimension, the losses of cross entropy, and their gradient;
// softmax_params.h defines the computation. The sum is relative to the maximum so far of each
// thread, so that a row is read once before it is written.
//
// A block takes as many rows at a time as fit; any grid.x is correct.
#include "exponential.cuh"
#include "rows.cuh"
#include "softmax_params.h"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS, kStages = TC_STAGES;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// total = sum of exp(x - max) over the elements so far. NaN propagates to total; max is never NaN.
struct ExpSum {
  float max = -kInfinity, total = 0;

  TC_DEVICE void raise(float higher) {
    if (!(higher > max)) return;
    if (max != -kInfinity) total *= exp2_approx((max - higher) * kLog2E);
    max = higher;
  }
  template <bool kExact, int kElements>
  TC_DEVICE void add(float (&x)[kElements]) {
    float highest = x[0];
#pragma unroll
    for (int j = 1; j < kElements; ++j) highest = fmaxf(highest, x[j]);
    raise(highest);
    exponentials<kExact>(x, max == -kInfinity ? 0.0f : max);  // of -inf alone, and NaN
#pragma unroll
    for (int j = 0; j < kElements; ++j) total += x[j];
  }
};

template <class Access>
TC_DEVICE void softmax(const RowsSoftmaxParams& p) {
  constexpr int kElements = Access::kElements;
  const Lane<Access> at(p.threads, p.columns);
  const Stages<Access, kBlock> stages(1, p.resident, p.x_dtype);
  const auto x_of = [&](tc_int64 row) { return RowOf(p.x, row * p.x_stride, p.x_dtype); };
  const auto copy = [&](tc_int64 row, int stage) { stages.copy(stage, 0, x_of(row), at); };
  for_each_row<kBlock, kStages>(p.rows, p.threads, copy, [&](tc_int64 row, int stage, bool valid) {
    const RowOf out(p.out, row * p.columns, p.out_dtype);
    const RowOf x_row = x_of(row);
    const bool has_target = p.targets != nullptr, is_gradient = p.grad_losses != nullptr;
    const tc_int64 target = has_target && valid ? p.targets[row] : 0;
    const bool ignored = has_target && target == p.ignore_index;
    const bool is_column = target >= 0 && target < p.columns;
    const float uniform = p.label_smoothing / static_cast<float>(p.columns);
    float max, log_sum = 0, scale, shift = 0, sum_x = 0;
    if (is_gradient) {
      if (!valid) return;
      max = p.logsumexp[row];
      scale = is_column ? p.grad_losses[row] : kNaN;
      shift = scale * uniform;
    } else {
      ExpSum own;
      if (valid) {
        at.for_each([&](int i, int column) {
          float x[kElements];
          stages.get(x, stage, 0, x_row, i, column);
          if (uniform != 0) {
#pragma unroll
            for (int j = 0; j < kElements; ++j) sum_x += x[j];
          }
          own.template add<Access::kExact>(x);
        });
      }
      max = join_row<kBlock>(own.max, p.threads, Max{});
      own.raise(max);
      float sums[2] = {own.total, sum_x};
      join_row<kBlock>(sums, p.threads, Add{});
      if (!valid) return;
      log_sum = logf(sums[0]);
      scale = 1.0f / sums[0];
      sum_x = sums[1];
    }
    if (has_target && !is_gradient) {
      if (at.lane != 0) return;
      const float logsumexp = max + log_sum;
      float loss = ignored ? 0.0f : kNaN;
      if (is_column && !ignored) {
        float x[1];
        Singles::load(x, x_row, static_cast<int>(target));
        // (x - max) first, as PyTorch: logsumexp - x would lose digits of small losses.
        loss = log_sum - (x[0] - max);
        if (uniform != 0) loss += p.label_smoothing * (x[0] - sum_x / p.columns);
      }
      p.losses[row] = loss;
      p.counted[row] = ignored ? 0.0f : 1.0f;
      p.logsumexp[row] = logsumexp;
      return;
    }
    at.for_each([&](int i, int column) {
      float x[kElements];
      stages.get(x, stage, 0, x_row, i, column);
      if (!p.log) exponentials<Access::kExact>(x, max);
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        x[j] = p.log ? x[j] - max - log_sum : x[j] * scale - shift;
      }
      if (is_gradient) {
#pragma unroll
        for (int j = 0; j < kElements; ++j) {
          if (column + j == target) x[j] -= scale * (1.0f - p.label_smoothing);
          if (ignored) x[j] = 0;
        }
      }
      Access::store(out, x, column);
    });
  });
}

extern "C" __global__ void __launch_bounds__(kBlock, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ RowsSoftmaxParams p) {
  wait_for_previous_kernel();
  with_access(p.columns, p.x_dtype, [&](auto access) { softmax<decltype(access)>(p); });
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": [80, 90],
 "kernels": [
  {"name": "softmax_rows", "kind": "softmax", "dtype": "any", "math": "float32", "layout": "any",
   "alignment": 2, "tile": [1, 8, 1], "stages": 2, "block": [512, 1, 1], "dynamic_shared": 0,
   "defines": {"TC_BLOCKS": 2}, "blocks": 2, "cost": {"k_tile": 0, "fixed": 0}}]}
*/
