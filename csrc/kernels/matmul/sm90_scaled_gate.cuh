// The epilogue of gated products of sm90_scaled.cu: SiLU of the gate's sums by the up's, quantised
// with a scale for 128 columns of a row. The bits are those of the product without a gate and of
// quantize/rows.cu after it, so that it does not matter which of both a call takes.
#pragma once

#include "common/float8_scale.cuh"
#include "sm90_scaled_params.h"

namespace torch_cubin {
namespace sm90 {

// Sums as the product without a gate would store them, by the factor of their rows.
template <DType kType>
TC_DEVICE void round_sums(float (&sum)[64], float factor) {
  using Traits = DTypeTraits<kType>;
#pragma unroll
  for (int i = 0; i < 64; ++i) sum[i] = Traits::load(Traits::round(sum[i] * factor));
}

// Stores one warp's 16 rows from row m on, up to m_end, of 128 columns from n0 on, and their
// scales. A lane has columns 8j + 2 * (lane % 4) and the next one, of rows lane / 4 and lane /
// 4 + 8. `factor` is 1, or NaN for rows of a group whose end is wrong. `staging`: the warp's 2048
// bytes of shared memory.
TC_DEVICE void gate_and_store_rows(const Sm90ScaledParams& p, int n0, u32 staging, int m, int m_end,
                                   float factor, float (&gates)[64], float (&ups)[64]) {
  constexpr int kColumns = 128, kVector = 16;
  const int lane = threadIdx.x % 32, in_quad = lane % 4;
  if (p.out_type == kScaledBFloat16) {
    round_sums<DType::bfloat16>(gates, factor);
    round_sums<DType::bfloat16>(ups, factor);
  } else if (p.out_type == kScaledFloat16) {
    round_sums<DType::float16>(gates, factor);
    round_sums<DType::float16>(ups, factor);
  } else {
    round_sums<DType::float32>(gates, factor);
    round_sums<DType::float32>(ups, factor);
  }
  float largest[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    float x = gated_by_silu(gates[i], ups[i]);
    x = __fmaf_rn(x, 0.0f, x);  // NaN for an infinity
    gates[i] = x;
    largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], fabsf(x));
  }
  const int powers = p.flags & kScaledPowerOfTwo;
  __syncwarp();  // the tile before has been read from the staging buffer
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float scale = float8_scale(largest_of_lanes<4>(largest[half]), 0, powers);
    const float inverse = __frcp_rn(scale);
    const int row = lane / 4 + 8 * half;
    if (in_quad == 0 && m + row < m_end) {
      p.gate_scales[(m + row) * p.gate_stride + n0 / kColumns * p.gate_stride_k] = scale;
    }
    // Rows begin at the same bank, so that their vectors of 16 bytes are swizzled.
    const u32 line = staging + row * kColumns + in_quad * 2;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float* x = gates + 4 * j + 2 * half;
      const u16 pair = pack_e4m3(x[0] * inverse, x[1] * inverse);
      asm volatile(
          "st.shared.u16 [%0], %1;" ::"r"(line + ((j / 2) ^ (row & 7)) * kVector + j % 2 * 8),
          "h"(pair)
          : "memory");
    }
  }
  __syncwarp();
  constexpr int kInRow = kColumns / kVector;
  const int vector = lane % kInRow;
#pragma unroll
  for (int row = lane / kInRow; row < 16; row += 32 / kInRow) {
    u32 words[4];
    load_shared(words, staging + row * kColumns + (vector ^ (row & 7)) * kVector);
    if (m + row >= m_end) continue;
    unsigned char* to = static_cast<unsigned char*>(p.out) + (m + row) * p.out_stride + n0;
    reinterpret_cast<uint4*>(to)[vector] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

}  // namespace sm90
}  // namespace torch_cubin
