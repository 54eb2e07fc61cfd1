// norm.cu for rows of 5 to 32 vectors of 16 bits, whose parameters have their dtype: 8, 16 or 32
// threads have a row, and each a vector of kShortRows rows, so that warps read and write whole
// lines, in fewer registers and instructions than other rows take (H200, layer norm of 65536 x 128:
// 11.8 -> 10.2 us).
#include "norm_params.h"
#include "rows.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr int kDtype = static_cast<int>(DType::TC_DTYPE), kRows = kShortRows;
using Access = Vectors<kDtype>;
using Raw = typename Access::Raw;
constexpr int kElements = Access::kElements;

template <int kLanes>
TC_DEVICE void join(float (&sums)[kRows]) {
#pragma unroll
  for (int other = kLanes / 2; other > 0; other /= 2) {
#pragma unroll
    for (float& sum : sums) sum += __shfl_xor_sync(~0u, sum, other);
  }
}

TC_DEVICE void load_parameter(Raw& raw, const void* parameter, int column, float otherwise) {
  float x[kElements];
#pragma unroll
  for (int j = 0; j < kElements; ++j) x[j] = otherwise;
  Access::pack(raw, x);
  if (parameter == nullptr) return;
  raw.parts[0] = static_cast<const FourWords*>(parameter)[column / kElements];
}

template <int kLanes, bool kCentered>
TC_DEVICE void normalize(const NormParams& p) {
  constexpr int kApart = TC_THREADS / kLanes;  // rows
  const u32 lane = threadIdx.x % kLanes;
  const int column = static_cast<int>(lane) * kElements;
  const bool own = column < p.columns;
  // 32 bits are enough for rows of 80 bytes at least.
  const u32 row = blockIdx.x * (kApart * kRows) + threadIdx.x / kLanes;
  const auto has = [&](int i) { return own && row + i * kApart < static_cast<u32>(p.rows); };
  const auto load = [&](Raw(&raw)[kRows], const void* x, tc_int64 stride) {
    const RowOf first(x, row * stride + column, kDtype);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (has(i)) Access::load_raw(raw[i], RowOf(first.data, i * kApart * stride, kDtype), 0);
    }
  };
  const tc_int64 first_element = static_cast<tc_int64>(row) * p.columns + column;
  const auto store = [&](void* to, int i, const Raw& raw) {
    const RowOf first(to, first_element, kDtype), own(first.data, i * kApart * p.columns, kDtype);
    *reinterpret_cast<FourWords*>(own.data) = raw.parts[0];
  };
  Raw raw[kRows], weight, bias;
  load(raw, p.x, p.x_stride);
  if (own) {
    load_parameter(weight, p.weight, column, 1.0f);
    load_parameter(bias, p.bias, column, -0.0f);  // changes no sum, not even that of -0 and 0
  }
  if (p.residual != nullptr) {
    Raw other[kRows];
    load(other, p.residual, p.residual_stride);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float x[kElements], y[kElements];
      Access::unpack(x, raw[i]);
      Access::unpack(y, other[i]);
#pragma unroll
      for (int j = 0; j < kElements; ++j) x[j] += y[j];
      Access::pack(raw[i], x);
      if (has(i)) store(p.sum, i, raw[i]);
    }
  }
  float x[kRows][kElements];
#pragma unroll
  for (int i = 0; i < kRows; ++i) Access::unpack(x[i], raw[i]);
  const float part = 1.0f / static_cast<float>(p.columns);
  float mean[kRows] = {}, rstd[kRows] = {};
  if constexpr (kCentered) {
    // Of differences from the first element, as in norm.cu: exact for rows of one value.
    float first[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      first[i] = __shfl_sync(~0u, x[i][0], 0, kLanes);
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kElements; ++j) sum += x[i][j];
      mean[i] = own ? fmaf(-first[i], kElements, sum) : 0.0f;
    }
    join<kLanes>(mean);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      mean[i] = first[i] + mean[i] * part;
#pragma unroll
      for (int j = 0; j < kElements; ++j) x[i][j] -= mean[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kElements; ++j) sum += x[i][j] * x[i][j];
    rstd[i] = own ? sum : 0.0f;
  }
  join<kLanes>(rstd);
  float w[kElements], b[kElements];
  Access::unpack(w, weight);
  Access::unpack(b, bias);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    rstd[i] = rsqrtf(rstd[i] * part + p.eps);
    if (!has(i)) continue;
    if (lane == 0) {
      if (kCentered) p.mean[row + i * kApart] = mean[i];
      p.rstd[row + i * kApart] = rstd[i];
    }
#pragma unroll
    for (int j = 0; j < kElements; ++j) x[i][j] = x[i][j] * rstd[i] * w[j] + b[j];
    Access::pack(raw[i], x[i]);
    store(p.out, i, raw[i]);
  }
}

template <bool kCentered>
TC_DEVICE void normalize(const NormParams& p) {
  if (p.threads == 8) return normalize<8, kCentered>(p);
  if (p.threads == 16) return normalize<16, kCentered>(p);
  normalize<32, kCentered>(p);
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ NormParams p) {
  wait_for_previous_kernel();
  p.centered ? normalize<true>(p) : normalize<false>(p);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": [90],
 "kernels": [
  {"name": "norm_short_rows_{d.short}", "kind": "norm_short", "archs": ["sm_90a"],
   "dtype": "{d.dtype}", "math": "float32", "layout": "any", "alignment": 16, "tile": [1, 8, 1],
   "stages": 1, "block": [256, 1, 1], "dynamic_shared": 0,
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": 5}, "cost": {"k_tile": 0, "fixed": 0},
   "for": {"d": [{"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"}]}}]}
*/
