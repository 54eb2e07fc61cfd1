// Numbers and products of attention's backward for e4m3 (sm90/e4m3_backward.cu): e5m2, the products
// of both types, and a head's factors.
#pragma once

#include "common/dtype.cuh"
#include "common/wgmma_e4m3.cuh"
#include "e4m3_backward_params.h"

namespace torch_cubin {
namespace sm90 {

TC_DEVICE float descale_of_head(const Sm90Descale& descale, int batch, int head) {
  if (descale.data == nullptr) return 1.0f;
  return __ldg(descale.data + batch * descale.stride[0] + head * descale.stride[1]);
}

// The inverse factor of a row of grad_out that is not finite.
constexpr u32 kNaN = 0x7fc00000;

TC_DEVICE float2 unpack_e4m3(u32 two) {
  u32 halves;
  asm("{ .reg .b16 low; mov.b32 {low, _}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }"
      : "=r"(halves)
      : "r"(two));
  return make_float2(f16_to_float(static_cast<u16>(halves)),
                     f16_to_float(static_cast<u16>(halves >> 16)));
}

// Packs four e5m2 numbers, the first in the lowest byte, rounded to nearest even; numbers beyond
// 57344 become that.
TC_DEVICE u32 pack_e5m2(float a, float b, float c, float d) {
  u32 out;
  asm("{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;"
      " cvt.rn.satfinite.e5m2x2.f32 high, %4, %3; mov.b32 %0, {low, high}; }"
      : "=r"(out)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return out;
}

// Like stmatrix(), transposed: a lane's 16-bit elements (row lane / 4, columns lane % 4 * 2 and the
// next one) of each matrix are stored to its rows of those columns.
TC_DEVICE void stmatrix_transposed(u32 shared, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared),
               "r"(a), "r"(b)
               : "memory");
}

// d (+)= a * b as by WgmmaE4m3, for e4m3 times kType ("e4m3" or "e5m2").
template <int kN>
struct WgmmaBytes;

#define TC_WGMMA_BYTES(NAME, N, I, TYPE, A, B, S)                                              \
  static TC_DEVICE void NAME(float (&d)[N / 2], u64 a, u64 b, int add) {                       \
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %" S                                      \
                 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3." TYPE " {" TC_D##I \
                 "}, %" A ", %" B ", add, 1, 1; }"                                             \
                 : TC_F##I                                                                     \
                 : "l"(a), "l"(b), "r"(add));                                                  \
  }

template <>
struct WgmmaBytes<48> {
  TC_WGMMA_BYTES(by_e4m3, 48, 5, "e4m3", "24", "25", "26")
  TC_WGMMA_BYTES(by_e5m2, 48, 5, "e5m2", "24", "25", "26")
};

template <>
struct WgmmaBytes<96> {
  TC_WGMMA_BYTES(by_e4m3, 96, 11, "e4m3", "48", "49", "50")
  TC_WGMMA_BYTES(by_e5m2, 96, 11, "e5m2", "48", "49", "50")
};

#undef TC_WGMMA_BYTES

}  // namespace sm90
}  // namespace torch_cubin
