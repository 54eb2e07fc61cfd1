// WgmmaRegisters of common/wgmma.cuh for head dims that only attention has.
#pragma once

#include "common/wgmma.cuh"

namespace torch_cubin {
namespace sm90 {

// I: N / 8 - 1. A0 to TB: the numbers of the operands that follow the N / 2 accumulators.
#define TC_BETWEEN_ASM(N, I, TYPE, A0, A1, A2, A3, B, S, TB)                                     \
  asm volatile("{ .reg .pred add; setp.ne.b32 add, %" S                                          \
               ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" TC_D##I \
               "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", add, 1, 1, %" TB "; }"          \
               : TC_F##I                                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransposeB))

#define TC_BETWEEN(N, I, A0, A1, A2, A3, B, S, TB)                                    \
  template <>                                                                         \
  struct WgmmaRegisters<N> {                                                          \
    template <WgmmaType kType, int kTransposeB>                                       \
    static TC_DEVICE void run(float (&d)[N / 2], const u32 (&a)[4], u64 b, int add) { \
      static_assert(kType != WgmmaType::tf32);                                        \
      if constexpr (kType == WgmmaType::bf16) {                                       \
        TC_BETWEEN_ASM(N, I, "bf16", A0, A1, A2, A3, B, S, TB);                       \
      } else {                                                                        \
        TC_BETWEEN_ASM(N, I, "f16", A0, A1, A2, A3, B, S, TB);                        \
      }                                                                               \
    }                                                                                 \
  };

TC_BETWEEN(32, 3, "16", "17", "18", "19", "20", "21", "22")
TC_BETWEEN(96, 11, "48", "49", "50", "51", "52", "53", "54")
TC_BETWEEN(160, 19, "80", "81", "82", "83", "84", "85", "86")
TC_BETWEEN(192, 23, "96", "97", "98", "99", "100", "101", "102")

#undef TC_BETWEEN
#undef TC_BETWEEN_ASM

}  // namespace sm90
}  // namespace torch_cubin
