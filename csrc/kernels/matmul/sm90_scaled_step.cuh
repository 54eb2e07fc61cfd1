// One stage of a product of 8-bit floats on Hopper: 128 of K by wgmma, and the addition of its
// result to float32 sums with scales.
//
// NOTE: wgmma adds products of 8-bit floats with about 14 bits of the largest addend and truncates
// the rest. So sums of all of K lose precision with K; the promoted step adds each 128 of K to
// float32 sums instead.
#pragma once

#include "common/wgmma.cuh"

namespace torch_cubin {
namespace sm90 {

enum class Float8 { e4m3, e5m2 };

// d (+)= a * b for 64 x kN outputs and 32 of K, by a warpgroup, with d laid out as by Wgmma. Both
// operands are K-major. With `add` false d is overwritten.
template <int kN>
struct WgmmaFloat8;

#define TC_WGMMA_FLOAT8_ASM(N, I, TYPES, A, B, S)                                        \
  asm volatile("{ .reg .pred add; setp.ne.b32 add, %" S                                  \
               ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPES " {" TC_D##I \
               "}, %" A ", %" B ", add, 1, 1; }"                                         \
               : TC_F##I                                                                 \
               : "l"(a), "l"(b), "r"(add))

// I: N / 8 - 1. A, B, S: the numbers of the operands that follow the N / 2 accumulators.
#define TC_WGMMA_FLOAT8(N, I, A, B, S)                                        \
  template <>                                                                 \
  struct WgmmaFloat8<N> {                                                     \
    template <Float8 kA, Float8 kB>                                           \
    static TC_DEVICE void run(float (&d)[N / 2], u64 a, u64 b, int add) {     \
      if constexpr (kA == Float8::e5m2) {                                     \
        static_assert(kB == Float8::e4m3, "no product of two e5m2 operands"); \
        TC_WGMMA_FLOAT8_ASM(N, I, "e5m2.e4m3", A, B, S);                      \
      } else if constexpr (kB == Float8::e5m2) {                              \
        TC_WGMMA_FLOAT8_ASM(N, I, "e4m3.e5m2", A, B, S);                      \
      } else {                                                                \
        TC_WGMMA_FLOAT8_ASM(N, I, "e4m3.e4m3", A, B, S);                      \
      }                                                                       \
    }                                                                         \
  };

TC_WGMMA_FLOAT8(32, 3, "16", "17", "18")
TC_WGMMA_FLOAT8(64, 7, "32", "33", "34")
TC_WGMMA_FLOAT8(128, 15, "64", "65", "66")
TC_WGMMA_FLOAT8(256, 31, "128", "129", "130")

#undef TC_WGMMA_FLOAT8
#undef TC_WGMMA_FLOAT8_ASM

// Issues the products of one stage for 64 rows, and neither commits nor waits. `a` and `b` describe
// tiles of rows of 128 bytes.
template <int kN, Float8 kA, Float8 kB>
TC_DEVICE void multiply_stage(float (&sum)[kN / 2], u64 a, u64 b, int add) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    WgmmaFloat8<kN>::template run<kA, kB>(sum, advance(a, k * 32), advance(b, k * 32),
                                          k == 0 ? add : 1);
  }
}

TC_DEVICE float load_scale(u32 shared) {
  u32 bits;
  load_shared(bits, shared);
  return __uint_as_float(bits);
}

// The scales of one stage: of the lane's two rows, lane / 4 and 8 rows below.
struct StageScales {
  float rows[2];
};

// sum += part * scale, for scales of rows alone.
template <int kN>
TC_DEVICE void promote(float (&sum)[kN / 2], const float (&part)[kN / 2],
                       const StageScales& scales) {
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) sum[i] = __fmaf_rn(part[i], scales.rows[i / 2 % 2], sum[i]);
}

// The same, also with the scales of kN columns, which are contiguous in shared memory.
template <int kN>
TC_DEVICE void promote_columns(float (&sum)[kN / 2], const float (&part)[kN / 2],
                               const StageScales& scales, u32 columns) {
  columns += threadIdx.x % 4 * 8;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    float column[2];
    load_shared(column, columns + j * 32);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[4 * j + i] =
          __fmaf_rn(part[4 * j + i], scales.rows[i / 2] * column[i % 2], sum[4 * j + i]);
    }
  }
}

}  // namespace sm90
}  // namespace torch_cubin
