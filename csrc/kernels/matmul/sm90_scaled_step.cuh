// One stage of a product of 8-bit floats on Hopper: 128 of K by wgmma, the addition of its result
// to float32 sums with scales, and the copies of those scales to shared memory.
//
// NOTE: wgmma adds products of 8-bit floats with about 14 bits of the largest addend and truncates
// the rest. So sums of all of K lose precision with K; the promoted step adds each 128 of K to
// float32 sums instead.
#pragma once

#include "common/hopper.cuh"
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
TC_WGMMA_FLOAT8(112, 13, "56", "57", "58")
TC_WGMMA_FLOAT8(128, 15, "64", "65", "66")
TC_WGMMA_FLOAT8(136, 16, "68", "69", "70")
TC_WGMMA_FLOAT8(160, 19, "80", "81", "82")
TC_WGMMA_FLOAT8(176, 21, "88", "89", "90")
TC_WGMMA_FLOAT8(192, 23, "96", "97", "98")
TC_WGMMA_FLOAT8(224, 27, "112", "113", "114")

#undef TC_WGMMA_FLOAT8
#undef TC_WGMMA_FLOAT8_ASM

// A descriptor that 32-bit additions move: one instruction where it is in uniform registers.
struct Descriptor {
  u32 low, high;
  TC_DEVICE operator u64() const { return static_cast<u64>(high) << 32 | low; }
};

TC_DEVICE Descriptor advance(Descriptor x, u32 bytes) { return {x.low + (bytes >> 4), x.high}; }

// Issues the products of one stage for 64 rows, and neither commits nor waits. `a` and `b` describe
// tiles of rows of 128 bytes.
template <int kN, Float8 kA, Float8 kB, class D>
TC_DEVICE void multiply_stage(float (&sum)[kN / 2], D a, D b, int add) {
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

// The product of one stage, and its scales: of the lane's two rows, and of the columns.
template <class C>
struct Part {
  float sum[C::kPartN / 2];
  StageScales scales;
  float column;
  int stage;

  // From `own`, the stage's in shared memory; `row` is the lane's first, of the tile, and
  // `number` the part's, of those side by side in a tile.
  TC_DEVICE void load_scales(u32 own, int row, int number) {
    if constexpr (!C::kColumns) column = load_scale(own + C::kTileM * 4 + number * 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) scales.rows[i] = load_scale(own + (row + 8 * i) * 4);
  }

  // Without scales.
  TC_DEVICE void add_to(float (&to)[C::kPartN / 2]) const {
#pragma unroll
    for (int i = 0; i < C::kPartN / 2; ++i) to[i] = __fadd_rn(to[i], sum[i]);
  }

  // NOTE: scales are multiplied here. Behind their loads ptxas puts the multiplications before the
  // stage's last wgmma, which then is issued a shared memory's latency later.
  TC_DEVICE void add_scaled_to(float (&to)[C::kPartN / 2], u32 own) const {
    if constexpr (C::kColumns) {
      promote_columns<C::kPartN>(to, sum, scales, own + C::kTileM * 4);
    } else {
      promote<C::kPartN>(to, sum, {scales.rows[0] * column, scales.rows[1] * column});
    }
  }
};

// Arrives at the barrier when the thread's copies so far have arrived.
TC_DEVICE void arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// The scales that one warp copies to shared memory for each stage of a tile: of kCount rows, a lane
// every 32nd. kContiguous: those of neighbouring rows follow one another, so that a lane's copies
// differ by constants. NOTE: with an address for each copy ptxas moves one after the other to the
// same registers, and so each copy waits until the one before it has read them.
template <int kCount, bool kContiguous>
struct ScaleCopies {
  static constexpr int kOwn = (kCount + 31) / 32, kAddresses = kContiguous ? 1 : kOwn;
  const float* from[kAddresses];
  bool exists[kOwn];

  TC_DEVICE ScaleCopies(const float* scales, int first, int size, int shift, tc_int64 stride) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int own = 32 * i + lane;
      exists[i] = first + own < size && own < kCount;
      if constexpr (!kContiguous) {
        from[i] = exists[i] ? scales + ((first + own) >> shift) * stride : scales;
      }
    }
    if constexpr (kContiguous) from[0] = scales + first + lane;
  }

  // Those of the next stage, which is `step` elements further.
  TC_DEVICE void copy(u32 to, tc_int64 step) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int own = 32 * i + threadIdx.x % 32;
      if (kCount % 32 == 0 || own < kCount) {
        cp_async<4>(to + own * 4, kContiguous ? from[0] + 32 * i : from[i], exists[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kAddresses; ++i) from[i] += step;
  }
};

}  // namespace sm90
}  // namespace torch_cubin
