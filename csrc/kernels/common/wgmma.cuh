// Hopper's tensor cores (sm_90a): wgmma, operand descriptors and accumulators.
#pragma once

#include "ptx.cuh"

namespace torch_cubin {
namespace sm90 {

// Descriptor of an operand in shared memory with the 128-byte swizzle, aligned to 1024 bytes.
// K-major (each 128-byte row holds 64 16-bit elements of K, for one m or n): `leading` is unused,
// `stride` is 1024 (from 8 rows to the next 8), and advancing K by 16 adds 32 bytes. MN-major (each
// row holds 64 elements of M or N, for one k): `leading` is the distance from 64 of M or N to the
// next 64, `stride` is 1024 (from 8 k to the next 8), and advancing K by 16 adds 2048 bytes.
TC_DEVICE u64 wgmma_descriptor(u32 shared, u32 leading_bytes, u32 stride_bytes) {
  return (u64(1) << 62) | (u64(stride_bytes >> 4) << 32) | (u64(leading_bytes >> 4) << 16) |
         ((shared & 0x3FFFF) >> 4);
}

// Byte offset of elements 16 * i to 16 * i + 15 of K (16-bit) in a K-major operand, stored in
// panels of 64 elements and `rows` rows.
constexpr TC_DEVICE int k_major_offset(int i, int rows) {
  return i / 4 * (rows * 128) + i % 4 * 32;
}

// Bytes from 16 of K to the next 16 in an MN-major operand: 16 rows of 128 bytes.
constexpr int kMnMajorStep = 16 * 128;

TC_DEVICE u64 advance(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }

// Required before the first wgmma after ordinary code accessed its registers.
TC_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

TC_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
TC_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads and writes of the accumulators across this point.
template <int kCount>
TC_DEVICE void keep_in_place(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

enum class WgmmaType { bf16, f16, tf32 };

// d (+)= a * b for 64 x kN outputs and 32 bytes of K, by a warpgroup. d[4j + 2h + c] of thread
// 32w + 4g + t is row 16w + 8h + g, column 8j + 2t + c. With `add` false d is overwritten.
// kTransposeA, kTransposeB: the operand is MN-major (16-bit types only).
template <int kN>
struct Wgmma;

// Register lists for asm: %0 to %(4i + 3), and d[0] to d[4i + 3].
#define TC_D0 "%0, %1, %2, %3"
#define TC_D1 TC_D0 ", %4, %5, %6, %7"
#define TC_D2 TC_D1 ", %8, %9, %10, %11"
#define TC_D3 TC_D2 ", %12, %13, %14, %15"
#define TC_D4 TC_D3 ", %16, %17, %18, %19"
#define TC_D5 TC_D4 ", %20, %21, %22, %23"
#define TC_D6 TC_D5 ", %24, %25, %26, %27"
#define TC_D7 TC_D6 ", %28, %29, %30, %31"
#define TC_D8 TC_D7 ", %32, %33, %34, %35"
#define TC_D9 TC_D8 ", %36, %37, %38, %39"
#define TC_D10 TC_D9 ", %40, %41, %42, %43"
#define TC_D11 TC_D10 ", %44, %45, %46, %47"
#define TC_D12 TC_D11 ", %48, %49, %50, %51"
#define TC_D13 TC_D12 ", %52, %53, %54, %55"
#define TC_D14 TC_D13 ", %56, %57, %58, %59"
#define TC_D15 TC_D14 ", %60, %61, %62, %63"
#define TC_D16 TC_D15 ", %64, %65, %66, %67"
#define TC_D17 TC_D16 ", %68, %69, %70, %71"
#define TC_D18 TC_D17 ", %72, %73, %74, %75"
#define TC_D19 TC_D18 ", %76, %77, %78, %79"
#define TC_D20 TC_D19 ", %80, %81, %82, %83"
#define TC_D21 TC_D20 ", %84, %85, %86, %87"
#define TC_D22 TC_D21 ", %88, %89, %90, %91"
#define TC_D23 TC_D22 ", %92, %93, %94, %95"
#define TC_D24 TC_D23 ", %96, %97, %98, %99"
#define TC_D25 TC_D24 ", %100, %101, %102, %103"
#define TC_D26 TC_D25 ", %104, %105, %106, %107"
#define TC_D27 TC_D26 ", %108, %109, %110, %111"
#define TC_D28 TC_D27 ", %112, %113, %114, %115"
#define TC_D29 TC_D28 ", %116, %117, %118, %119"
#define TC_D30 TC_D29 ", %120, %121, %122, %123"
#define TC_D31 TC_D30 ", %124, %125, %126, %127"
#define TC_O(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TC_F0 TC_O(0)
#define TC_F1 TC_F0, TC_O(4)
#define TC_F2 TC_F1, TC_O(8)
#define TC_F3 TC_F2, TC_O(12)
#define TC_F4 TC_F3, TC_O(16)
#define TC_F5 TC_F4, TC_O(20)
#define TC_F6 TC_F5, TC_O(24)
#define TC_F7 TC_F6, TC_O(28)
#define TC_F8 TC_F7, TC_O(32)
#define TC_F9 TC_F8, TC_O(36)
#define TC_F10 TC_F9, TC_O(40)
#define TC_F11 TC_F10, TC_O(44)
#define TC_F12 TC_F11, TC_O(48)
#define TC_F13 TC_F12, TC_O(52)
#define TC_F14 TC_F13, TC_O(56)
#define TC_F15 TC_F14, TC_O(60)
#define TC_F16 TC_F15, TC_O(64)
#define TC_F17 TC_F16, TC_O(68)
#define TC_F18 TC_F17, TC_O(72)
#define TC_F19 TC_F18, TC_O(76)
#define TC_F20 TC_F19, TC_O(80)
#define TC_F21 TC_F20, TC_O(84)
#define TC_F22 TC_F21, TC_O(88)
#define TC_F23 TC_F22, TC_O(92)
#define TC_F24 TC_F23, TC_O(96)
#define TC_F25 TC_F24, TC_O(100)
#define TC_F26 TC_F25, TC_O(104)
#define TC_F27 TC_F26, TC_O(108)
#define TC_F28 TC_F27, TC_O(112)
#define TC_F29 TC_F28, TC_O(116)
#define TC_F30 TC_F29, TC_O(120)
#define TC_F31 TC_F30, TC_O(124)

#define TC_WGMMA_ASM(N, I, K, TYPE, A, B, S, TRANSPOSES)                                        \
  asm volatile("{ .reg .pred add; setp.ne.b32 add, %" S                                         \
               ", 0;"                                                                           \
               " wgmma.mma_async.sync.aligned.m64n" #N "k" K ".f32." TYPE "." TYPE " {" TC_D##I \
               "}, %" A ", %" B ", add, 1, 1" TRANSPOSES "; }"                                  \
               : TC_F##I                                                                        \
               : "l"(a), "l"(b), "r"(add), "n"(kTransposeA), "n"(kTransposeB))

// I: N / 8 - 1. A, B, S, TA, TB: the numbers of the operands that follow the N / 2 accumulators.
#define TC_WGMMA(N, I, A, B, S, TA, TB)                                                    \
  template <>                                                                              \
  struct Wgmma<N> {                                                                        \
    template <WgmmaType kType, int kTransposeA, int kTransposeB>                           \
    static TC_DEVICE void run(float (&d)[N / 2], u64 a, u64 b, int add) {                  \
      if constexpr (kType == WgmmaType::bf16) {                                            \
        TC_WGMMA_ASM(N, I, "16", "bf16", A, B, S, ", %" TA ", %" TB);                      \
      } else if constexpr (kType == WgmmaType::f16) {                                      \
        TC_WGMMA_ASM(N, I, "16", "f16", A, B, S, ", %" TA ", %" TB);                       \
      } else {                                                                             \
        static_assert(!kTransposeA && !kTransposeB, "TF32 operands of wgmma are K-major"); \
        TC_WGMMA_ASM(N, I, "8", "tf32", A, B, S, "");                                      \
      }                                                                                    \
    }                                                                                      \
  };

TC_WGMMA(8, 0, "4", "5", "6", "7", "8")
TC_WGMMA(16, 1, "8", "9", "10", "11", "12")
TC_WGMMA(32, 3, "16", "17", "18", "19", "20")
TC_WGMMA(48, 5, "24", "25", "26", "27", "28")
TC_WGMMA(64, 7, "32", "33", "34", "35", "36")
TC_WGMMA(80, 9, "40", "41", "42", "43", "44")
TC_WGMMA(96, 11, "48", "49", "50", "51", "52")
TC_WGMMA(128, 15, "64", "65", "66", "67", "68")
TC_WGMMA(160, 19, "80", "81", "82", "83", "84")
TC_WGMMA(192, 23, "96", "97", "98", "99", "100")
TC_WGMMA(224, 27, "112", "113", "114", "115", "116")
TC_WGMMA(256, 31, "128", "129", "130", "131", "132")

#undef TC_WGMMA
#undef TC_WGMMA_ASM

// Wgmma with `a` in registers, for 16 of K: a[0] and a[2] hold row 16w + g, columns 2t and 2t + 8
// (and the next ones), a[1] and a[3] the same of row 16w + g + 8. So accumulators of 16 columns,
// packed in pairs, are an operand as they are. The registers may be overwritten only after a
// wgmma_wait that covers this product.
template <int kN>
struct WgmmaRegisters;

#define TC_WGMMA_REGISTERS_ASM(N, I, TYPE, A0, A1, A2, A3, B, S, TB)                             \
  asm volatile("{ .reg .pred add; setp.ne.b32 add, %" S                                          \
               ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" TC_D##I \
               "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", add, 1, 1, %" TB "; }"          \
               : TC_F##I                                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransposeB))

#define TC_WGMMA_REGISTERS(N, I, A0, A1, A2, A3, B, S, TB)                            \
  template <>                                                                         \
  struct WgmmaRegisters<N> {                                                          \
    template <WgmmaType kType, int kTransposeB>                                       \
    static TC_DEVICE void run(float (&d)[N / 2], const u32 (&a)[4], u64 b, int add) { \
      static_assert(kType != WgmmaType::tf32);                                        \
      if constexpr (kType == WgmmaType::bf16) {                                       \
        TC_WGMMA_REGISTERS_ASM(N, I, "bf16", A0, A1, A2, A3, B, S, TB);               \
      } else {                                                                        \
        TC_WGMMA_REGISTERS_ASM(N, I, "f16", A0, A1, A2, A3, B, S, TB);                \
      }                                                                               \
    }                                                                                 \
  };

TC_WGMMA_REGISTERS(64, 7, "32", "33", "34", "35", "36", "37", "38")
TC_WGMMA_REGISTERS(128, 15, "64", "65", "66", "67", "68", "69", "70")
TC_WGMMA_REGISTERS(256, 31, "128", "129", "130", "131", "132", "133", "134")

#undef TC_WGMMA_REGISTERS
#undef TC_WGMMA_REGISTERS_ASM

}  // namespace sm90
}  // namespace torch_cubin
