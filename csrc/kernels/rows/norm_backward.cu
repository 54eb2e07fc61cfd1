// The derivative of layer norm and RMS norm; norm_params.h defines the computation. Each block sums
// the gradients of weight and bias over its own rows, in shared memory; where that does not suffice
// norm_columns.cu computes them.
//
// A block takes as many rows at a time as fit. Any grid.x is correct; with sums_w or sums_b it
// decides the number of their parts.
#include "norm_params.h"
#include "rows.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS, kStages = TC_STAGES;
constexpr int kPart = kBlock * 16;  // bytes of half a vector of floats, of all threads

TC_DEVICE void clear(u32 sums) {
  store_shared(sums, {0.0f, 0.0f, 0.0f, 0.0f});
  store_shared(sums + kPart, {0.0f, 0.0f, 0.0f, 0.0f});
}

// Adds to a thread's own sums of one vector in shared memory.
TC_DEVICE void add_to(u32 sums, const float (&terms)[8]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum[4];
    load_shared(sum, sums + half * kPart);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] += terms[half * 4 + j];
    store_shared(sums + half * kPart, sum);
  }
}

template <class Access>
TC_DEVICE void differentiate(const NormParams& p) {
  constexpr int kElements = Access::kElements;
  constexpr bool kSums = kElements > 1;  // single elements are not summed here
  const Lane<Access> at(p.threads, p.columns);
  const Stages<Access, kBlock> stages(2, p.resident, p.row_dtype);
  // After the stages; with sums every vector of a thread is resident.
  const auto sums_of = [&](int which, int i) {
    return stages.address(kStages, 0, 0) + (which * p.resident + i) * 2 * kPart;
  };
  const float part = 1.0f / static_cast<float>(p.columns);
  const RowOf weight(p.weight, 0, p.weight_dtype);
  const auto x_of = [&](tc_int64 row) { return RowOf(p.x, row * p.x_stride, p.row_dtype); };
  const auto grad_of = [&](tc_int64 row) {
    return RowOf(p.grad_out, row * p.grad_out_stride, p.row_dtype);
  };
  const auto copy = [&](tc_int64 row, int stage) {
    stages.copy(stage, 0, x_of(row), at);
    stages.copy(stage, 1, grad_of(row), at);
  };
  if constexpr (kSums) {
    at.for_each([&](int i, int) {
      if (p.sums_w != nullptr) clear(sums_of(0, i));
      if (p.sums_b != nullptr) clear(sums_of(1, i));
    });
  }
  for_each_row<kBlock, kStages>(p.rows, p.threads, copy, [&](tc_int64 row, int stage, bool valid) {
    const RowOf grad_sum(p.grad_sum, row * p.grad_sum_stride, p.row_dtype);
    const RowOf grad_x(p.grad_x, row * p.columns, p.row_dtype);
    const RowOf x_row = x_of(row), grad_row = grad_of(row);
    const float mean = valid && p.centered ? p.mean[row] : 0.0f;
    const float rstd = valid ? p.rstd[row] : 0.0f;
    // x_hat and grad_out of a vector.
    const auto get = [&](float (&x)[kElements], float (&grad)[kElements], int i, int column) {
      stages.get(x, stage, 0, x_row, i, column);
      stages.get(grad, stage, 1, grad_row, i, column);
#pragma unroll
      for (int j = 0; j < kElements; ++j) x[j] = (x[j] - mean) * rstd;
    };
    const auto weigh = [&](float (&grad)[kElements], int column) {
      if (p.weight == nullptr) return;
      float factor[kElements];
      Access::load(factor, weight, column);
#pragma unroll
      for (int j = 0; j < kElements; ++j) grad[j] *= factor[j];
    };
    float totals[2] = {0, 0};
    if (valid) {
      at.for_each([&](int i, int column) {
        float x[kElements], grad[kElements];
        get(x, grad, i, column);
        if constexpr (kSums) {
          if (p.sums_b != nullptr) add_to(sums_of(1, i), grad);
          if (p.sums_w != nullptr) {
            float terms[kElements];
#pragma unroll
            for (int j = 0; j < kElements; ++j) terms[j] = grad[j] * x[j];
            add_to(sums_of(0, i), terms);
          }
        }
        weigh(grad, column);
#pragma unroll
        for (int j = 0; j < kElements; ++j) {
          totals[0] += grad[j] * x[j];
          totals[1] += grad[j];
        }
      });
    }
    join_row<kBlock>(totals, p.threads, Add{});
    if (!valid) return;
    const float of_x = totals[0] * part;
    const float shift = p.centered ? totals[1] * part : 0.0f;
    at.for_each([&](int i, int column) {
      float x[kElements], grad[kElements];
      get(x, grad, i, column);
      weigh(grad, column);
#pragma unroll
      for (int j = 0; j < kElements; ++j) x[j] = rstd * (grad[j] - x[j] * of_x - shift);
      if (p.grad_sum != nullptr) {
        Access::load(grad, grad_sum, column);
#pragma unroll
        for (int j = 0; j < kElements; ++j) x[j] += grad[j];
      }
      Access::store(grad_x, x, column);
    });
  });
  if constexpr (kSums) {
    const tc_int64 group =
        static_cast<tc_int64>(blockIdx.x) * (kBlock / p.threads) + threadIdx.x / p.threads;
    const auto write = [&](float* to, int which) {
      if (to == nullptr) return;
      const RowOf row(to, group * p.columns, kRowFloat32);
      at.for_each([&](int i, int column) {
        float low[4], high[4];
        load_shared(low, sums_of(which, i));
        load_shared(high, sums_of(which, i) + kPart);
        Vectors<true>::store(
            row, {low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]}, column);
      });
    };
    write(p.sums_w, 0);
    write(p.sums_b, 1);
  }
}

extern "C" __global__ void __launch_bounds__(kBlock, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ NormParams p) {
  wait_for_previous_kernel();
  with_access(p.columns, p.row_dtype, [&](auto access) { differentiate<decltype(access)>(p); });
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": [80, 90],
 "kernels": [
  {"name": "norm_backward_rows", "kind": "norm_backward", "dtype": "any", "math": "float32",
   "layout": "any", "alignment": 2, "tile": [1, 8, 1], "stages": 3, "block": [256, 1, 1],
   "dynamic_shared": 0, "defines": {"TC_BLOCKS": 3}, "blocks": 3,
   "cost": {"k_tile": 0, "fixed": 0}}]}
*/
