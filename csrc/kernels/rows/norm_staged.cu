// norm.cu, but for a bias without a weight, for rows by vectors that a block's shared memory holds
// (staged.cuh), whose parameters have their dtype. Every pass reads the row there.
#include "norm_params.h"
#include "norm_prefetch.cuh"
#include "staged.cuh"

namespace torch_cubin::TC_KERNEL {

enum Call { kMean, kSquares, kCalls };
using Row = StagedRow<DType::TC_DTYPE, kCalls, 0>;
using Access = Row::Access;

// Without branches, the parameters of all vectors are loaded before the first is used.
template <bool kCentered, bool kHasWeight, bool kHasBias>
TC_DEVICE void normalize(const NormParams& p, const Row& row) {
  const auto for_each = [&](auto&& body) {
    row.for_each([&](int i, int column) {
      Row::Raw raw;
      row.get(raw, 0, i);
      float x[8];
      Access::unpack(x, raw);
      body(x, column);
    });
  };
  const float part = 1.0f / static_cast<float>(p.columns);
  float mean = 0;
  if constexpr (kCentered) {
    float sum = 0;
    for_each([&](float (&x)[8], int) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += x[j];
    });
    // Corrected by what total * part has lost, it is exact for rows of one value, whose total is:
    // its 11 bits at most, times 2,048 vectors at most. rstd would multiply an error.
    const float total = row.sum(sum, kMean), mean_of = total * part;
    mean = fmaf(fmaf(-mean_of, static_cast<float>(p.columns), total), part, mean_of);
  }
  float squares = 0;
  for_each([&](float (&x)[8], int) {
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += (x[j] - mean) * (x[j] - mean);
  });
  // The parameters of a thread's first vectors, as many as there are registers for, are loaded
  // while the threads meet, and the others' together (H200, RMS norm of 256 x 4096 2.4 -> 2.0 us).
  constexpr int kAtOnce = kHasBias ? kStagedVectors / 2 : kStagedVectors;
  Row::Raw weight[kAtOnce], bias[kAtOnce];
  const auto load_parameters = [&](int first) {
    row.for_each([&](int i, int column) {
      if (i < first || i >= first + kAtOnce) return;
      const int at = column / kRowVector;
      if (kHasWeight) weight[i % kAtOnce].parts[0] = static_cast<const FourWords*>(p.weight)[at];
      if (kHasBias) bias[i % kAtOnce].parts[0] = static_cast<const FourWords*>(p.bias)[at];
    });
  };
  load_parameters(0);
  const float rstd = rsqrtf(row.sum(squares, kSquares) * part + p.eps);
  if (threadIdx.x == 0) {
    if (kCentered) p.mean[blockIdx.x] = mean;
    p.rstd[blockIdx.x] = rstd;
  }
  char* const out =
      static_cast<char*>(p.out) + static_cast<tc_int64>(blockIdx.x) * (p.columns * tc_int64(2));
#pragma unroll
  for (int first = 0; first < kStagedVectors; first += kAtOnce) {
    if (first > 0) load_parameters(first);
    row.for_each([&](int i, int column) {
      if (i < first || i >= first + kAtOnce) return;
      Row::Raw raw;
      row.get(raw, 0, i);
      float x[8], other[8];
      Access::unpack(x, raw);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = (x[j] - mean) * rstd;
      if constexpr (kHasWeight) {
        Access::unpack(other, weight[i % kAtOnce]);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] *= other[j];
      }
      if constexpr (kHasBias) {
        Access::unpack(other, bias[i % kAtOnce]);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] += other[j];
      }
      Access::pack(raw, x);
      *reinterpret_cast<FourWords*>(out + column * tc_int64(2)) = raw.parts[0];
    });
  }
}

// Turns the row into its sum with the residual; each thread its own vectors.
TC_DEVICE void add_residual(const NormParams& p, const Row& row) {
  char* const sum =
      static_cast<char*>(p.sum) + static_cast<tc_int64>(blockIdx.x) * (p.columns * tc_int64(2));
  row.for_each([&](int i, int column) {
    Row::Raw raw, other;
    row.get(raw, 0, i);
    row.get(other, 1, i);
    float x[8], y[8];
    Access::unpack(x, raw);
    Access::unpack(y, other);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] += y[j];
    Access::pack(raw, x);
    store_shared(row.address(0, i), raw.parts[0].words);
    *reinterpret_cast<FourWords*>(sum + column * tc_int64(2)) = raw.parts[0];
  });
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ NormParams p) {
  with_staged_row<Row>(
      p, {{p.x, p.x_stride}, {p.residual, p.residual_stride}}, [&] { prefetch_parameters(p); },
      [&](const Row& row) {
        if (p.residual != nullptr) add_residual(p, row);
        if (p.weight == nullptr) {
          p.centered ? normalize<true, false, false>(p, row)
                     : normalize<false, false, false>(p, row);
        } else if (!p.centered) {
          normalize<false, true, false>(p, row);
        } else {
          p.bias == nullptr ? normalize<true, true, false>(p, row)
                            : normalize<true, true, true>(p, row);
        }
      });
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": [90],
 "kernels": [
  {"name": "norm_staged_rows_{d.short}", "kind": "norm_staged", "archs": ["sm_90a"],
   "dtype": "{d.dtype}", "math": "float32", "layout": "any", "alignment": 16, "tile": [1, 8, 1],
   "stages": 1, "block": [512, 1, 1], "dynamic_shared": 0,
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": 3}, "cost": {"k_tile": 0, "fixed": 0},
   "for": {"d": [{"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"}]}}]}
*/
