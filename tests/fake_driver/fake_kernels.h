// What the kernels of examples/cpp compute, on the host: with FAKE_CUDA_COMPUTE in the environment
// a launch on the stand-in driver does their work, so that a program's own check of its numbers
// shows that every argument arrived.
#pragma once

#include <cuda.h>

#include <string>
#include <vector>

#include "../../examples/cpp/fmha_params.h"
#include "../../examples/cpp/support.h"

namespace {

template <class T>
T argument(void** params, int index) {
  return *static_cast<const T*>(params[index]);
}

void compute_product(void** params) {
  const int m = argument<int>(params, 3), n = argument<int>(params, 4);
  const int k = argument<int>(params, 5);
  const auto* a = argument<const uint16_t*>(params, 0);
  const auto* b = argument<const uint16_t*>(params, 1);
  const std::vector<double> c =
      example::product({a, a + size_t(m) * k}, {b, b + size_t(k) * n}, m, n, k);
  for (size_t i = 0; i < c.size(); ++i) argument<float*>(params, 2)[i] = static_cast<float>(c[i]);
}

void compute_attention(const FmhaParams& p) {
  const auto* qkv = static_cast<const uint16_t*>(p.qkv);
  auto* out = static_cast<uint16_t*>(p.out);
  for (int b = 0; b < p.batch; ++b) {
    for (int query = 0; query < p.seqlen; ++query) {
      for (int h = 0; h < p.heads; ++h) {
        const auto at = [&](int row, int part, int i) {
          const int64_t start = (int64_t{b} * p.seqlen + row) * p.row_stride;
          return double{example::to_float(qkv[start + (part * p.heads + h) * 64 + i])};
        };
        double row[64] = {}, total = 0;
        for (int key = 0; key < (p.is_causal ? query + 1 : p.seqlen); ++key) {
          double score = 0;
          for (int i = 0; i < 64; ++i) score += at(query, 0, i) * at(key, 1, i);
          const double weight = std::exp(score * p.scale);
          total += weight;
          for (int i = 0; i < 64; ++i) row[i] += weight * at(key, 2, i);
        }
        for (const double value : row) *out++ = example::to_half(static_cast<float>(value / total));
      }
    }
  }
}

void compute(const std::string& name, const CUlaunchConfig& config, void** params) {
  const long threads = static_cast<long>(config.gridDimX) * config.blockDimX;
  if (name == "_Z6vecAddPKfS0_Pfi" || name == "scale_add") {
    const bool scaled = name == "scale_add";
    const float scale = scaled ? argument<float>(params, 3) : 1;
    const int n = argument<int>(params, scaled ? 4 : 3);
    for (long i = 0; i < n && i < threads; ++i) {
      argument<float*>(params, 2)[i] =
          argument<const float*>(params, 0)[i] * scale + argument<const float*>(params, 1)[i];
    }
  } else if (name == "matmul_fp16" || name == "matmul_kernel") {
    compute_product(params);
  } else if (name == "fmha_packed") {
    compute_attention(argument<FmhaParams>(params, 0));
  }
}

}  // namespace
