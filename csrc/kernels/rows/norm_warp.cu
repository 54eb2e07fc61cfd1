// norm.cu for rows by vectors of 16 bits that lanes of a warp hold (warp_rows.cuh), whose
// parameters have their dtype; without a bias in RMS norm. A row is converted once, and stays in
// registers as floats.
#include "norm_params.h"
#include "norm_prefetch.cuh"
#include "warp_rows.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr int kDtype = static_cast<int>(DType::TC_DTYPE);
constexpr int kRows = TC_TILE_M, kVectors = TC_TILE_N / (32 * kRowVector);

template <int kLanes, bool kCentered, bool kResidual>
struct Norm {
  using Rows = WarpRows<kDtype, TC_THREADS, kLanes, kRows, kVectors, TC_UNSURE>;
  using Access = typename Rows::Access;
  using Raw = typename Rows::Raw;
  static constexpr int kElements = Rows::kElements;
  const NormParams& p;
  const Rows rows{p.rows, p.columns};

  TC_DEVICE void load_parameter(Raw (&raw)[kVectors], const void* parameter,
                                float otherwise) const {
    float x[kElements];
#pragma unroll
    for (int j = 0; j < kElements; ++j) x[j] = otherwise;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      Access::pack(raw[i], x);
      if (parameter == nullptr || !rows.has(i)) continue;
      raw[i].parts[0] = static_cast<const FourWords*>(parameter)[rows.column(i) / kElements];
    }
  }

  TC_DEVICE void load_parameters(Raw (&weight)[kVectors], Raw (&bias)[kVectors]) const {
    load_parameter(weight, p.weight, 1.0f);
    if (kCentered)
      load_parameter(bias, p.bias, -0.0f);  // changes no sum, not even that of -0 and 0
  }

  TC_DEVICE void store(void* to, int r, int i, const Raw& raw) const {
    const RowOf row(to, rows.row(r) * p.columns, kDtype);
    reinterpret_cast<FourWords*>(row.data)[rows.column(i) / kElements] = raw.parts[0];
  }

  TC_DEVICE void add_residual(Raw (&raw)[kRows][kVectors],
                              const Raw (&other)[kRows][kVectors]) const {
    rows.for_each([&](int r, int i) {
      float x[kElements], y[kElements];
      Access::unpack(x, raw[r][i]);
      Access::unpack(y, other[r][i]);
#pragma unroll
      for (int j = 0; j < kElements; ++j) x[j] += y[j];
      Access::pack(raw[r][i], x);
      if (rows.has_row(r) && rows.has(i)) store(p.sum, r, i, raw[r][i]);
    });
  }

  TC_DEVICE void run() const {
    Raw raw[kRows][kVectors], weight[kVectors], bias[kVectors];
    const auto x_at = rows.places(p.x, p.x_stride);
    typename Rows::Places residual_at;
    if constexpr (kResidual) residual_at = rows.places(p.residual, p.residual_stride);
    wait_for_previous_kernel();
    // Of short rows 1.3% quicker so (65536 x 128, H200), but not with a residual.
    rows.template load<kVectors == 1 && !kResidual>(raw, x_at);
    if constexpr (kResidual) {
      Raw other[kRows][kVectors];
      rows.load(other, residual_at);
      add_residual(raw, other);
    }
    load_parameters(weight, bias);
    float x[kRows][kVectors][kElements];
    rows.for_each([&](int r, int i) { Access::unpack(x[r][i], raw[r][i]); });
    const float part = 1.0f / static_cast<float>(p.columns);
    float mean[kRows] = {}, rstd[kRows] = {};
    if constexpr (kCentered) {
      // Of differences from the first element, as in norm.cu: exact for rows of one value.
      float first[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) first[r] = __shfl_sync(~0u, x[r][0][0], 0, kLanes);
      rows.for_each([&](int r, int i) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < kElements; ++j) sum += x[r][i][j];
        if (rows.has(i)) mean[r] += fmaf(-first[r], kElements, sum);
      });
      rows.sum(mean);
#pragma unroll
      for (int r = 0; r < kRows; ++r) mean[r] = first[r] + mean[r] * part;
      rows.for_each([&](int r, int i) {
#pragma unroll
        for (int j = 0; j < kElements; ++j) x[r][i][j] -= mean[r];
      });
    }
    rows.for_each([&](int r, int i) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kElements; ++j) sum += x[r][i][j] * x[r][i][j];
      if (rows.has(i)) rstd[r] += sum;
    });
    rows.sum(rstd);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rstd[r] = rsqrtf(rstd[r] * part + p.eps);
      if (rows.lane != 0 || !rows.has_row(r)) continue;
      if (kCentered) p.mean[rows.row(r)] = mean[r];
      p.rstd[rows.row(r)] = rstd[r];
    }
    rows.for_each([&](int r, int i) {
      if (!rows.has_row(r) || !rows.has(i)) return;
      float w[kElements], b[kElements];
      Access::unpack(w, weight[i]);
      if (kCentered) Access::unpack(b, bias[i]);
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        x[r][i][j] *= rstd[r];
        x[r][i][j] = kCentered ? x[r][i][j] * w[j] + b[j] : x[r][i][j] * w[j];
      }
      Access::pack(raw[r][i], x[r][i]);
      store(p.out, r, i, raw[r][i]);
    });
  }
};

template <bool kCentered, bool kResidual>
TC_DEVICE void normalize(const NormParams& p) {
  with_lanes<kVectors>(
      p.threads, [&](auto lanes) { Norm<decltype(lanes)::value, kCentered, kResidual>{p}.run(); });
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ NormParams p) {
  prefetch_parameters(p);
  if (p.residual == nullptr) {
    p.centered ? normalize<true, false>(p) : normalize<false, false>(p);
  } else {
    p.centered ? normalize<true, true>(p) : normalize<false, true>(p);
  }
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": [90],
 "kernels": [
  {"name": "norm_warp_rows_{d.short}_{size.columns}", "kind": "norm_warp", "math": "float32",
   "tile": ["{size.rows}", "{size.columns}", 1], "block": [128, 1, 1], "archs": ["sm_90a"],
   "cost": {"k_tile": 0, "fixed": 0},
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": "{size.blocks}", "TC_UNSURE": 1},
   "for": {
    "d": "f16 bf16",
    "size": [
     ["columns", "rows", "blocks"],
     [ 256, 2, 10],
     [ 512, 1, 10],
     [ 768, 1,  8],
     [1024, 1,  6]]}}]}
*/
