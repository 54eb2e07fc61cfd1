// wgmma (sm_90a) for e4m3 operands: float32 sums, both operands K-major.
//
// NOTE: the sums have less precision than float32. Each product over 32 of K is added with about 14
// bits of the largest addend; the rest is truncated.
#pragma once

#include "wgmma.cuh"

namespace torch_cubin {
namespace sm90 {

// Descriptor of a K-major operand, aligned to 1024 bytes, with rows of kRowBytes (64 or 128) in
// shared memory and the swizzle of that size. Wider operands are stored in panels; k_major_bytes()
// is the offset along K.
template <int kRowBytes>
TC_DEVICE u64 k_major_descriptor(u32 shared) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  return (u64(kRowBytes == 128 ? 1 : 2) << 62) | (u64(8 * kRowBytes >> 4) << 32) |
         ((shared & 0x3FFFF) >> 4);
}

// Byte offset of element 32 * i of K, in panels of kRowBytes elements and kRows rows.
template <int kRowBytes, int kRows>
constexpr TC_DEVICE int k_major_bytes(int i) {
  return 32 * i / kRowBytes * (kRows * kRowBytes) + 32 * i % kRowBytes;
}

// d (+)= a * b for 64 x kN outputs and 32 of K, by a warpgroup, with d laid out as by Wgmma. With
// `add` false d is overwritten.
template <int kN>
struct WgmmaE4m3;

// WgmmaE4m3 with `a` in registers: a[0] and a[2] hold row 16w + g, columns 4t to 4t + 3 and those
// plus 16, a[1] and a[3] the same of row 16w + g + 8. The registers may be overwritten only after a
// wgmma_wait that covers this product.
template <int kN>
struct WgmmaE4m3Registers;

#define TC_WGMMA_E4M3(N, I, A, B, S)                                                         \
  template <>                                                                                \
  struct WgmmaE4m3<N> {                                                                      \
    static TC_DEVICE void run(float (&d)[N / 2], u64 a, u64 b, int add) {                    \
      asm volatile("{ .reg .pred add; setp.ne.b32 add, %" S                                  \
                   ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" TC_D##I \
                   "}, %" A ", %" B ", add, 1, 1; }"                                         \
                   : TC_F##I                                                                 \
                   : "l"(a), "l"(b), "r"(add));                                              \
    }                                                                                        \
  };

#define TC_WGMMA_E4M3_REGISTERS(N, I, A0, A1, A2, A3, B, S)                                  \
  template <>                                                                                \
  struct WgmmaE4m3Registers<N> {                                                             \
    static TC_DEVICE void run(float (&d)[N / 2], const u32 (&a)[4], u64 b, int add) {        \
      asm volatile("{ .reg .pred add; setp.ne.b32 add, %" S                                  \
                   ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" TC_D##I \
                   "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", add, 1, 1; }"           \
                   : TC_F##I                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));          \
    }                                                                                        \
  };

TC_WGMMA_E4M3(64, 7, "32", "33", "34")
TC_WGMMA_E4M3(128, 15, "64", "65", "66")
TC_WGMMA_E4M3(192, 23, "96", "97", "98")
TC_WGMMA_E4M3_REGISTERS(64, 7, "32", "33", "34", "35", "36", "37")
TC_WGMMA_E4M3_REGISTERS(128, 15, "64", "65", "66", "67", "68", "69")
TC_WGMMA_E4M3_REGISTERS(256, 31, "128", "129", "130", "131", "132", "133")

#undef TC_WGMMA_E4M3
#undef TC_WGMMA_E4M3_REGISTERS

// The same product by one warp, for one m16n8 tile: d += a * b. `a` is as above; b0 and b1 hold
// rows 4t to 4t + 3 and those plus 16.
TC_DEVICE void mma_e4m3(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Packs four e4m3 numbers, the first in the lowest byte, rounded as by pack_e4m3.
TC_DEVICE u32 pack_e4m3(float a, float b, float c, float d) {
  u32 out;
  asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;"
      " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high}; }"
      : "=r"(out)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return out;
}

}  // namespace sm90
}  // namespace torch_cubin
