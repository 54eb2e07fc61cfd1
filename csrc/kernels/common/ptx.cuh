// The PTX instructions that the kernels use, one function per instruction, and fixed-width types.
// Needs no CUDA header.
#pragma once

#include <utility>

namespace torch_cubin {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using tc_int64 = long long;  // the same name as in the headers shared with the host

#define TC_DEVICE __device__ __forceinline__

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

template <class Body, int... kIndices>
TC_DEVICE void unrolled(Body&& body, std::integer_sequence<int, kIndices...>) {
  (body(Constant<kIndices>{}), ...);
}

// Calls body(0), ..., body(kCount - 1). Each argument is a constant expression through
// decltype(i)::value.
template <int kCount, class Body>
TC_DEVICE void unrolled(Body&& body) {
  unrolled(body, std::make_integer_sequence<int, kCount>{});
}

// ---- programmatic dependent launch --------------------------------------------------------------

// On sm_90 and newer a kernel may start while the previous kernel of the stream is ending. Every
// thread waits here before it accesses global memory, until the previous kernel has ended and its
// results are visible. NOTE: no block may return before it, or the next kernel could miss results
// of the previous one.
TC_DEVICE void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Allows the next kernel's blocks to start; they wait in wait_for_previous_grid.
TC_DEVICE void launch_next_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The first statement of a kernel that does nothing between the two.
TC_DEVICE void wait_for_previous_kernel() {
  wait_for_previous_grid();
  launch_next_grid();
}

// Reads a number from L2 that the previous kernel may still be writing. Before
// wait_for_previous_grid() the value may be stale: what follows from it may only be prefetched, and
// is computed again after the wait (build/ptx_waits.py allows this load).
TC_DEVICE int read_early(const int* at) {
  int value;
  asm volatile("ld.relaxed.gpu.global.L1::no_allocate.b32 %0, [%1];" : "=r"(value) : "l"(at));
  return value;
}

// Prefetches the 128 bytes around an address to the L2 cache.
TC_DEVICE void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

TC_DEVICE u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Copies kBytes to shared memory, or writes zeros if `valid` is false; then nothing is read, and
// the source may be any address.
template <int kBytes>
TC_DEVICE void cp_async(u32 shared, const void* global, bool valid) {
  if constexpr (kBytes == 16) {
    asm volatile(
        "{ .reg .pred ignore; setp.eq.u32 ignore, %2, 0;"
        " cp.async.cg.shared.global.L2::128B [%0], [%1], 16, ignore; }" ::"r"(shared),
        "l"(global), "r"(static_cast<u32>(valid)));
  } else {
    asm volatile(
        "{ .reg .pred ignore; setp.eq.u32 ignore, %2, 0;"
        " cp.async.ca.shared.global [%0], [%1], %3, ignore; }" ::"r"(shared),
        "l"(global), "r"(static_cast<u32>(valid)), "n"(kBytes));
  }
}

// Copies the first `bytes` of 16 bytes to shared memory, and fills the rest with zeros.
TC_DEVICE void cp_async_bytes(u32 shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes));
}

TC_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;"); }

template <int kPending>
TC_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending));
}

// Loads four 8x8 matrices of 16-bit elements; lanes 8j..8j+7 give the row addresses of matrix j.
template <bool kTranspose>
TC_DEVICE void ldmatrix(u32 (&out)[4], u32 shared) {
  if constexpr (kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared));
  }
}

TC_DEVICE void load_shared(u32& out, u32 shared) {
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(out) : "r"(shared));
}

TC_DEVICE void load_shared(double& out, u32 shared) {
  asm volatile("ld.shared.f64 %0, [%1];" : "=d"(out) : "r"(shared));
}

// Two contiguous floats, aligned to 8 bytes.
TC_DEVICE void load_shared(float (&out)[2], u32 shared) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(out[0]), "=f"(out[1]) : "r"(shared));
}

// Four contiguous words, aligned to 16 bytes.
TC_DEVICE void load_shared(u32 (&out)[4], u32 shared) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared));
}

TC_DEVICE void load_shared(float (&out)[4], u32 shared) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(out[0]), "=f"(out[1]), "=f"(out[2]), "=f"(out[3])
               : "r"(shared));
}

TC_DEVICE void store_shared(u32 shared, u16 value) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(shared), "h"(value));
}

TC_DEVICE void store_shared(u32 shared, u32 value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(value));
}

TC_DEVICE void store_shared(u32 shared, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared), "f"(value));
}

TC_DEVICE void store_shared(u32 shared, double value) {
  asm volatile("st.shared.f64 [%0], %1;" ::"r"(shared), "d"(value));
}

TC_DEVICE void store_shared(u32 shared, const u32 (&value)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(value[0]),
               "r"(value[1]), "r"(value[2]), "r"(value[3]));
}

TC_DEVICE void store_shared(u32 shared, const float (&value)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(value[0]),
               "f"(value[1]), "f"(value[2]), "f"(value[3]));
}

// Rounds to nearest; NaN stays NaN. sm_90 needs one instruction (ties to even), sm_80 three (ties
// away from zero).
TC_DEVICE u32 round_to_tf32(u32 bits) {
  u32 out;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(out) : "f"(__uint_as_float(bits)));
#else
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out) : "f"(__uint_as_float(bits)));
#endif
  return out;
}

TC_DEVICE u32 pack_f16(float low, float high) {
  u32 out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

TC_DEVICE u32 pack_bf16(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

TC_DEVICE float f16_to_float(u16 bits) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
  return out;
}

// Converts two e4m3 numbers to float16, which represents them exactly. Requires sm_89.
TC_DEVICE u32 e4m3_to_f16(u16 pair) {
  u32 out;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(pair));
  return out;
}

// Rounds to nearest, ties to even; magnitudes above 448, including infinities, become 448. Requires
// sm_89.
TC_DEVICE u16 pack_e4m3(float low, float high) {
  u16 out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
}

TC_DEVICE float bf16_to_float(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

// d += a * b for one m16n8 tile, with K = 16 (16-bit types) or 8 (tf32, double).
TC_DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

TC_DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

TC_DEVICE void mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

TC_DEVICE void mma_f64(double (&d)[4], const double (&a)[4], double b0, double b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b0), "d"(b1));
#else
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int k4 = 0; k4 < 2; ++k4) {
      asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                   : "+d"(d[2 * half]), "+d"(d[2 * half + 1])
                   : "d"(a[half + 2 * k4]), "d"(k4 == 0 ? b0 : b1));
    }
  }
#endif
}

// 2 to the power of x, by the special function unit; subnormal results are flushed to 0.
TC_DEVICE float exp2_approx(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

}  // namespace torch_cubin
