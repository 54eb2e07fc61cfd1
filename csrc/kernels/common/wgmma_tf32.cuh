// wgmma (sm_90a) for TF32 with one operand in registers, which therefore need not be K-major as
// TF32 operands in shared memory must be.
#pragma once

#include "wgmma.cuh"

namespace torch_cubin {
namespace sm90 {

// d (+)= a * b for 64 x kN outputs and 8 of K, by a warpgroup. d is laid out as by Wgmma, b is
// K-major in shared memory. a[0] and a[2] hold row 16w + g, columns t and t + 4; a[1] and a[3] the
// same of row 16w + g + 8. The registers may be overwritten only after a wgmma_wait that covers
// this product. With `add` false d is overwritten.
template <int kN>
struct WgmmaTf32Registers;

#define TC_WGMMA_TF32_REGISTERS(N, I, A0, A1, A2, A3, B, S)                                 \
  template <>                                                                               \
  struct WgmmaTf32Registers<N> {                                                            \
    static TC_DEVICE void run(float (&d)[N / 2], const u32 (&a)[4], u64 b, int add) {       \
      asm volatile("{ .reg .pred add; setp.ne.b32 add, %" S                                 \
                   ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 {" TC_D##I \
                   "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", add, 1, 1; }"          \
                   : TC_F##I                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));         \
    }                                                                                       \
  };

TC_WGMMA_TF32_REGISTERS(128, 15, "64", "65", "66", "67", "68", "69")
TC_WGMMA_TF32_REGISTERS(256, 31, "128", "129", "130", "131", "132", "133")

#undef TC_WGMMA_TF32_REGISTERS

}  // namespace sm90
}  // namespace torch_cubin
