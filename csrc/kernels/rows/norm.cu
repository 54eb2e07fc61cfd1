// Layer norm and RMS norm over the last dimension, with a residual added before; norm_params.h
// defines the computation. Mean and variance are computed one after the other.
//
// Each block takes as many rows as it holds, or each cluster of blocks one row.
#include "norm_params.h"
#include "norm_prefetch.cuh"
#include "rows.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS, kDtype = static_cast<int>(DType::TC_DTYPE);

// The first element of a row, from memory.
TC_DEVICE float read_first(const NormParams& p, tc_int64 row) {
  using Access = Singles<kDtype>;
  const float x = element_of(p.x, kDtype, row * p.x_stride);
  if (p.residual == nullptr) return x;
  const float sum = x + element_of(p.residual, kDtype, row * p.residual_stride);
  return Access::value_of(Access::bits_of(sum, kDtype), kDtype);
}

template <class Access>
TC_DEVICE void normalize(const NormParams& p) {
  constexpr int kElements = Access::kElements;
  using Own = Lane<Access>;
  const float part = 1.0f / static_cast<float>(p.columns);
  const RowOf weight(p.weight, 0, p.weight_dtype), bias(p.bias, 0, p.bias_dtype);
  const auto [row, valid] = OwnRow(p.rows, p.threads, p.cluster);
  const Own at(p.threads, p.cluster, p.columns);
  const RowOf x_row(p.x, row * p.x_stride, p.row_dtype);
  const RowOf residual(p.residual, row * p.residual_stride, p.row_dtype);
  typename Own::Raw raw[Own::kHeld];
  const auto load = [&](int first) {
    at.load(raw, x_row, first);
    if (p.residual == nullptr) return;
    typename Own::Raw other[Own::kHeld];
    at.load(other, residual, first);
#pragma unroll
    for (int i = 0; i < Own::kHeld; ++i) {
      float x[kElements], y[kElements];
      Access::unpack(x, raw[i]);
      Access::unpack(y, other[i]);
#pragma unroll
      for (int j = 0; j < kElements; ++j) x[j] += y[j];
      Access::pack(raw[i], x);
    }
  };
  const auto for_each = [&](auto&& body) { at.for_each_unpacked(raw, load, body); };
  load(0);
  RowJoin<Sums<1>, kBlock> join(p.threads, p.cluster);
  float mean = 0;
  if (p.centered) {
    // The mean of the differences from the first element, which is exact for rows of one value:
    // rstd would multiply an error. Sums of kElements of them are: it is a power of two.
    const float first = at.first_element(raw, [&, row = row] { return read_first(p, row); });
    Sums<1> sum = {{0}};
    for_each([&](float (&x)[kElements], int) { sum.of[0] += fmaf(-first, kElements, sum_of(x)); });
    join(sum, Sums<1>::Join{});
    mean = first + sum.of[0] * part;
  }
  Sums<1> squares = {{0}};
  for_each([&](float (&x)[kElements], int) {
#pragma unroll
    for (int j = 0; j < kElements; ++j) squares.of[0] += (x[j] - mean) * (x[j] - mean);
  });
  join(squares, Sums<1>::Join{});
  const float rstd = rsqrtf(squares.of[0] * part + p.eps);
  if (!valid) return;
  if (at.lane == 0) {
    if (p.mean != nullptr) p.mean[row] = mean;
    p.rstd[row] = rstd;
  }
  const RowOf out(p.out, row * p.columns, p.row_dtype);
  const RowOf sum(p.sum, row * p.columns, p.row_dtype);
  for_each([&](float (&x)[kElements], int column) {
    float other[kElements];
    if (p.residual != nullptr) Access::store_own(sum, x, column);
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
    Access::store_own(out, x, column);
  });
}

extern "C" __global__ void __launch_bounds__(kBlock, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ NormParams p) {
  prefetch_parameters(p);
  wait_for_previous_kernel();
  with_held_access<DType::TC_DTYPE>(p.threads, p.cluster, p.columns,
                                    [&](auto access) { normalize<decltype(access)>(p); });
}

}  // namespace torch_cubin::TC_KERNEL

// accepted_spill: a few registers of a kernel that is bound by memory; a fourth block to hide its
// latency is worth more.
/* torch_cubin kernels
{"kernels": [
  {"name": "norm_rows_{d.short}_{size.threads}", "kind": "norm", "math": "float32", "alignment": 2,
   "tile": [1, 8, 1], "block": ["{size.threads}", 1, 1], "accepted_spill": "{d.spill}",
   "cost": {"k_tile": 0, "fixed": 0},
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": "{size.blocks}"},
   "for": {
    "d": [
     ["short", "dtype", "spill"],
     ["f16",  "float16",  {}],
     ["bf16", "bfloat16", {}],
     ["f32",  "float32",  {"sm_80": 48}]],
    "size": [{"threads": 256, "blocks": 4}, {"threads": 512, "blocks": 2}]}}]}
*/
