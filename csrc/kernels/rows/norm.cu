// Layer norm and RMS norm over the last dimension, with a residual added before; norm_params.h
// defines the computation. Mean and variance are computed one after the other.
//
// A block takes as many rows at a time as fit; any grid.x is correct.
#include "norm_params.h"
#include "rows.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS, kStages = TC_STAGES;

template <class Access>
TC_DEVICE void normalize(const NormParams& p) {
  constexpr int kElements = Access::kElements;
  const Lane<Access> at(p.threads, p.columns);
  const Stages<Access, kBlock> stages(p.residual != nullptr ? 2 : 1, p.resident, p.row_dtype);
  const float part = 1.0f / static_cast<float>(p.columns);
  const RowOf weight(p.weight, 0, p.weight_dtype), bias(p.bias, 0, p.bias_dtype);
  const auto x_of = [&](tc_int64 row) { return RowOf(p.x, row * p.x_stride, p.row_dtype); };
  const auto residual_of = [&](tc_int64 row) {
    return RowOf(p.residual, row * p.residual_stride, p.row_dtype);
  };
  const auto copy = [&](tc_int64 row, int stage) {
    stages.copy(stage, 0, x_of(row), at);
    if (p.residual != nullptr) stages.copy(stage, 1, residual_of(row), at);
  };
  for_each_row<kBlock, kStages>(p.rows, p.threads, copy, [&](tc_int64 row, int stage, bool valid) {
    const RowOf out(p.out, row * p.columns, p.row_dtype);
    const RowOf sum(p.sum, row * p.columns, p.row_dtype);
    const RowOf x_row = x_of(row);
    if (p.residual != nullptr && valid) {
      const RowOf residual = residual_of(row);
      at.for_each([&](int i, int column) {
        float x[kElements], y[kElements];
        stages.get(x, stage, 0, x_row, i, column);
        stages.get(y, stage, 1, residual, i, column);
#pragma unroll
        for (int j = 0; j < kElements; ++j) x[j] += y[j];
        Access::store(sum, x, column);
        stages.put(x, stage, 0, i);
      });
    }
    // The copy of x has become the sum, which is normalized.
    const RowOf summed = p.residual != nullptr ? sum : x_row;
    float mean = 0, squares = 0;
    if (p.centered) {
      if (valid) {
        at.for_each([&](int i, int column) {
          float x[kElements];
          stages.get(x, stage, 0, summed, i, column);
#pragma unroll
          for (int j = 0; j < kElements; ++j) mean += x[j];
        });
      }
      mean = join_row<kBlock>(mean, p.threads, Add{}) * part;
    }
    if (valid) {
      at.for_each([&](int i, int column) {
        float x[kElements];
        stages.get(x, stage, 0, summed, i, column);
#pragma unroll
        for (int j = 0; j < kElements; ++j) squares += (x[j] - mean) * (x[j] - mean);
      });
    }
    squares = join_row<kBlock>(squares, p.threads, Add{});
    if (!valid) return;
    const float rstd = rsqrtf(squares * part + p.eps);
    if (at.lane == 0) {
      if (p.mean != nullptr) p.mean[row] = mean;
      p.rstd[row] = rstd;
    }
    at.for_each([&](int i, int column) {
      float x[kElements], other[kElements];
      stages.get(x, stage, 0, summed, i, column);
#pragma unroll
      for (int j = 0; j < kElements; ++j) x[j] = (x[j] - mean) * rstd;
      if (p.weight != nullptr) {
        Access::load(other, weight, column);
#pragma unroll
        for (int j = 0; j < kElements; ++j) x[j] *= other[j];
      }
      if (p.bias != nullptr) {
        Access::load(other, bias, column);
#pragma unroll
        for (int j = 0; j < kElements; ++j) x[j] += other[j];
      }
      Access::store(out, x, column);
    });
  });
}

constexpr int kHeld = 2;  // vectors of a thread

// The same for rows of at most kHeld vectors a thread, which stay in registers, as the weight does
// from row to row.
template <class Access>
TC_DEVICE void normalize_held(const NormParams& p) {
  const Lane<Access> at(p.threads, p.columns);
  const Stages<Access, kBlock> stages(p.residual != nullptr ? 2 : 1, p.resident, p.row_dtype);
  const float part = 1.0f / static_cast<float>(p.columns);
  const RowOf weight(p.weight, 0, p.weight_dtype), bias(p.bias, 0, p.bias_dtype);
  const auto copy = [&](tc_int64 row, int stage) {
    stages.copy(stage, 0, RowOf(p.x, row * p.x_stride, p.row_dtype), at);
    if (p.residual == nullptr) return;
    stages.copy(stage, 1, RowOf(p.residual, row * p.residual_stride, p.row_dtype), at);
  };
  // Calls body(i, column) for the thread's vectors, where i is a constant after unrolling.
  const auto for_held = [&](auto&& body) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int column = (at.lane + i * p.threads) * 8;
      if (column < p.columns) body(i, column);
    }
  };
  float factor[kHeld][8];
  for_held([&](int i, int column) {
    if (p.weight != nullptr) {
      Access::load(factor[i], weight, column);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) factor[i][j] = 1;
    }
  });
  for_each_row<kBlock, kStages>(p.rows, p.threads, copy, [&](tc_int64 row, int stage, bool valid) {
    float x[kHeld][8], mean = 0, squares = 0;
    if (valid) {
      for_held([&](int i, int column) {
        stages.get_resident(x[i], stage, 0, i);
        if (p.residual != nullptr) {
          float y[8];
          stages.get_resident(y, stage, 1, i);
#pragma unroll
          for (int j = 0; j < 8; ++j) x[i][j] += y[j];
          Access::round(x[i], p.row_dtype);
          Access::store_own(RowOf(p.sum, row * p.columns, p.row_dtype), x[i], column);
        }
      });
    }
    if (p.centered) {
      if (valid) {
        for_held([&](int i, int) {
#pragma unroll
          for (int j = 0; j < 8; ++j) mean += x[i][j];
        });
      }
      mean = join_row<kBlock>(mean, p.threads, Add{}) * part;
      if (valid) {
        for_held([&](int i, int) {
#pragma unroll
          for (int j = 0; j < 8; ++j) x[i][j] -= mean;
        });
      }
    }
    if (valid) {
      for_held([&](int i, int) {
#pragma unroll
        for (int j = 0; j < 8; ++j) squares += x[i][j] * x[i][j];
      });
    }
    squares = join_row<kBlock>(squares, p.threads, Add{});
    if (!valid) return;
    const float rstd = rsqrtf(squares * part + p.eps);
    if (at.lane == 0) {
      if (p.mean != nullptr) p.mean[row] = mean;
      p.rstd[row] = rstd;
    }
    for_held([&](int i, int column) {
#pragma unroll
      for (int j = 0; j < 8; ++j) x[i][j] *= rstd * factor[i][j];
      if (p.bias != nullptr) {
        float shift[8];
        Access::load(shift, bias, column);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[i][j] += shift[j];
      }
      Access::store_own(RowOf(p.out, row * p.columns, p.row_dtype), x[i], column);
    });
  });
}

extern "C" __global__ void __launch_bounds__(kBlock, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ NormParams p) {
  wait_for_previous_kernel();
  with_access(p.columns, p.row_dtype, [&](auto access) {
    using Access = decltype(access);
    if constexpr (Access::kElements > 1) {
      if (p.columns <= p.threads * 8 * min(kHeld, p.resident)) return normalize_held<Access>(p);
    }
    normalize<Access>(p);
  });
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": [80, 90],
 "kernels": [
  {"name": "norm_rows", "kind": "norm", "dtype": "any", "math": "float32", "layout": "any",
   "alignment": 2, "tile": [1, 8, 1], "stages": 4, "block": [256, 1, 1], "dynamic_shared": 0,
   "defines": {"TC_BLOCKS": 4}, "blocks": 4, "cost": {"k_tile": 0, "fixed": 0}}]}
*/
