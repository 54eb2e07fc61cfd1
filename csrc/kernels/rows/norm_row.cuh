// Layer norm and RMS norm, but for a bias without a weight, of a row that a block has by vectors of
// 16 bits, with parameters of its dtype: in shared memory (staged.cuh), or in registers
// (block_row.cuh). Every pass reads it there.
#pragma once

#include "norm_params.h"
#include "norm_prefetch.cuh"
#include "rows.cuh"

namespace torch_cubin {

enum NormCall { kNormMean, kNormSquares, kNormCalls };  // of Row::sum

// Without branches, the parameters of all vectors are loaded before the first is used.
template <bool kCentered, bool kHasWeight, bool kHasBias, class Row>
TC_DEVICE void normalize(const NormParams& p, Row& row) {
  using Access = typename Row::Access;
  const auto for_each = [&](auto&& body) {
    row.for_each([&](int i, int column) {
      typename Row::Raw raw;
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
    const float total = row.sum(sum, kNormMean), mean_of = total * part;
    mean = fmaf(fmaf(-mean_of, static_cast<float>(p.columns), total), part, mean_of);
  }
  float squares = 0;
  for_each([&](float (&x)[8], int) {
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += (x[j] - mean) * (x[j] - mean);
  });
  // The parameters of a thread's first vectors, as many as there are registers for, are loaded
  // while the threads meet, and the others' together (H200, RMS norm of 256 x 4096 2.4 -> 2.0 us).
  constexpr int kAtOnce = kHasBias && Row::kVectors > 2 ? Row::kVectors / 2 : Row::kVectors;
  typename Row::Raw weight[kAtOnce], bias[kAtOnce];
  const auto load_parameters = [&](int first) {
    row.for_each([&](int i, int column) {
      if (i < first || i >= first + kAtOnce) return;
      const int at = column / kRowVector;
      if (kHasWeight) weight[i % kAtOnce].parts[0] = static_cast<const FourWords*>(p.weight)[at];
      if (kHasBias) bias[i % kAtOnce].parts[0] = static_cast<const FourWords*>(p.bias)[at];
    });
  };
  load_parameters(0);
  const float rstd = rsqrtf(row.sum(squares, kNormSquares) * part + p.eps);
  if (threadIdx.x == 0) {
    if (kCentered) p.mean[blockIdx.x] = mean;
    p.rstd[blockIdx.x] = rstd;
  }
  char* const out =
      static_cast<char*>(p.out) + static_cast<tc_int64>(blockIdx.x) * (p.columns * tc_int64(2));
#pragma unroll
  for (int first = 0; first < Row::kVectors; first += kAtOnce) {
    if (first > 0) load_parameters(first);
    row.for_each([&](int i, int column) {
      if (i < first || i >= first + kAtOnce) return;
      typename Row::Raw raw;
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
template <class Row>
TC_DEVICE void add_residual(const NormParams& p, Row& row) {
  using Access = typename Row::Access;
  char* const sum =
      static_cast<char*>(p.sum) + static_cast<tc_int64>(blockIdx.x) * (p.columns * tc_int64(2));
  row.for_each([&](int i, int column) {
    typename Row::Raw raw, other;
    row.get(raw, 0, i);
    row.get(other, 1, i);
    float x[8], y[8];
    Access::unpack(x, raw);
    Access::unpack(y, other);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] += y[j];
    Access::pack(raw, x);
    row.put(raw, 0, i);
    *reinterpret_cast<FourWords*>(sum + column * tc_int64(2)) = raw.parts[0];
  });
}

template <class Row>
TC_DEVICE void normalize_row(const NormParams& p, Row& row) {
  if (p.residual != nullptr) add_residual(p, row);
  if (p.weight == nullptr) {
    p.centered ? normalize<true, false, false>(p, row) : normalize<false, false, false>(p, row);
  } else if (!p.centered) {
    normalize<false, true, false>(p, row);
  } else {
    p.bias == nullptr ? normalize<true, true, false>(p, row) : normalize<true, true, true>(p, row);
  }
}

}  // namespace torch_cubin
