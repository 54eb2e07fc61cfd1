// The PTX of Hopper (sm_90a), one function an instruction: mbarriers, the tensor memory accelerator
// (TMA), wgmma, clusters. No CUDA or CUTLASS header.
//
// Names: `shared` is an address in this block's shared memory (shared_address), `remote` one in
// another block of the cluster (map_to_rank). "Elected" is whichever single thread the caller chose.
#pragma once

#include "ptx.cuh"

namespace torch_cubin {
namespace sm90 {

// ---- mbarriers ----------------------------------------------------------------------------------

TC_DEVICE void barrier_init(u32 shared, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared), "r"(arrivals) : "memory");
}

// After barrier_init, before the other threads (of the cluster) or the TMA use the barriers.
TC_DEVICE void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival that also expects `bytes` more from the TMA. The bytes are all that will land in this
// block, those that another block of the cluster multicasts included.
TC_DEVICE void barrier_expect(u32 shared, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared), "r"(bytes)
               : "memory");
}

TC_DEVICE void barrier_arrive(u32 shared) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared) : "memory");
}

// NOTE: with .release.cluster spelled out ptxas emits MEMBAR.ALL.GPU: 0.71x of the speed.
TC_DEVICE void barrier_arrive_remote(u32 remote) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}

TC_DEVICE bool barrier_try(u32 shared, u32 parity) {
  u32 done;
  asm volatile(
      "{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;"
      " selp.b32 %0, 1, 0, done; }"
      : "=r"(done)
      : "r"(shared), "r"(parity)
      : "memory");
  return done != 0;
}

// Waits until the phase of that parity has ended.
TC_DEVICE void barrier_wait(u32 shared, u32 parity) {
  while (!barrier_try(shared, parity)) {
  }
}

// barrier_wait for a thread that mostly waits: the hardware puts it to sleep for up to so long at a
// time, where it would otherwise look every few dozen cycles, which takes issue slots and power.
TC_DEVICE void barrier_sleep(u32 shared, u32 parity) {
  constexpr u32 kNanoseconds = 1000000;
#ifdef TC_BOUND_NANOSECONDS
  u64 start = 0, now;
#endif
  for (;;) {
    u32 done;
    asm volatile(
        "{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2, %3;"
        " selp.b32 %0, 1, 0, done; }"
        : "=r"(done)
        : "r"(shared), "r"(parity), "r"(kNanoseconds)
        : "memory");
    if (done != 0) return;
#ifdef TC_BOUND_NANOSECONDS
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (start == 0) start = now;
    if (now - start > TC_BOUND_NANOSECONDS) asm volatile("trap;");
#endif
  }
}

// Waits for a phase that another block of the cluster completes, and sees what that block wrote.
TC_DEVICE void barrier_wait_remote(u32 shared, u32 parity) {
  u32 done = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred done; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], "
        "%2;"
        " selp.b32 %0, 1, 0, done; }"
        : "=r"(done)
        : "r"(shared), "r"(parity)
        : "memory");
  }
}

// barrier_wait for a thread with registers to spare: with TC_BOUND_NANOSECONDS (first runs of a new
// kernel) a barrier that does not complete in that time traps instead of hanging the GPU.
TC_DEVICE void barrier_wait_bounded(u32 shared, u32 parity) {
#ifdef TC_BOUND_NANOSECONDS
  u64 start = 0, now;
  while (!barrier_try(shared, parity)) {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (start == 0) start = now;
    if (now - start > TC_BOUND_NANOSECONDS) asm volatile("trap;");
  }
#else
  barrier_wait(shared, parity);
#endif
}

// ---- clusters -----------------------------------------------------------------------------------

TC_DEVICE u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

TC_DEVICE u32 cluster_size() {
  u32 size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// The address, for `shared::cluster` instructions, of what lies at `shared` in block `rank`.
TC_DEVICE u32 map_to_rank(u32 shared, u32 rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
  return remote;
}

TC_DEVICE void store_remote(u32 remote, float a, float b, float c, float d) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(remote), "f"(a), "f"(b),
               "f"(c), "f"(d)
               : "memory");
}

// Asynchronously: it counts as 16 bytes on that block's mbarrier, which makes the values visible to
// who waits for it; no other fence is needed.
TC_DEVICE void store_remote_async(u32 remote, const float* value, u32 remote_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(remote),
      "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3]), "r"(remote_barrier)
      : "memory");
}

// All threads of all blocks of the cluster that have not exited; orders shared memory among them.
TC_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same where the threads of a warp may stand at different instructions.
TC_DEVICE void cluster_sync_unaligned() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// The same without order of memory (a release to the cluster is MEMBAR.ALL.GPU).
TC_DEVICE void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  asm volatile("barrier.cluster.wait;" ::: "memory");
}

// cluster_meet in two parts, so that other work fits between them, for whole warps.
TC_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

TC_DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- barriers among some warps of a block -------------------------------------------------------

// `id` 1 to 15 (0 is __syncthreads); `threads` counts those that sync and those that arrive.
TC_DEVICE void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

TC_DEVICE void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- programmatic dependent launch --------------------------------------------------------------

// Every thread that reads or writes global memory calls it first.
TC_DEVICE void wait_for_previous_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

TC_DEVICE void launch_next_grid() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- registers ----------------------------------------------------------------------------------

// By all warps of a warpgroup. Multiples of 8; ignored unless the kernel has __launch_bounds__(n, 1).
template <int kRegisters>
TC_DEVICE void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
TC_DEVICE void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- tensor memory accelerator ------------------------------------------------------------------

TC_DEVICE void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Cache hints: what createpolicy.fractional.L2 makes of evict_first and evict_last for all lines.
constexpr u64 kEvictFirst = 0x12F0000000000000ull;
constexpr u64 kEvictLast = 0x14F0000000000000ull;

// Brings a box to the L2 cache. It is not a read: what an earlier kernel is still writing stays
// right, so it may stand before wait_for_previous_grid.
TC_DEVICE void tma_prefetch(const void* map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(x),
               "r"(y)
               : "memory");
}

// A box of the tensor to `shared`; `barrier` receives its bytes. Coordinates from the innermost dim.
TC_DEVICE void tma_load(u32 shared, const void* map, u32 barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

TC_DEVICE void tma_load(u32 shared, const void* map, u32 barrier, int x, int y, int b0, int b1) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(b0), "r"(b1)
      : "memory");
}

TC_DEVICE void tma_load(u32 shared, const void* map, u32 barrier, int x, int y, u64 hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "l"(hint)
      : "memory");
}

TC_DEVICE void tma_load(u32 shared, const void* map, u32 barrier, int x, int y, int b0, int b1,
                        int b2) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(b0), "r"(b1), "r"(b2)
      : "memory");
}

// The same, to the same place in every block of `mask`, each block's own barrier receiving the bytes.
TC_DEVICE void tma_multicast(u32 shared, const void* map, u32 barrier, u16 mask, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(shared),
      "l"(map), "r"(barrier), "h"(mask), "r"(x), "r"(y)
      : "memory");
}

TC_DEVICE void tma_multicast(u32 shared, const void* map, u32 barrier, u16 mask, int x, int y,
                             int b0, int b1, int b2) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(shared),
      "l"(map), "r"(barrier), "h"(mask), "r"(x), "r"(y), "r"(b0), "r"(b1), "r"(b2)
      : "memory");
}

TC_DEVICE void tma_store(const void* map, u32 shared, int x, int y, u64 hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint"
      " [%0, {%2, %3}], [%1], %4;" ::"l"(map),
      "r"(shared), "r"(x), "r"(y), "l"(hint)
      : "memory");
}

TC_DEVICE void tma_store(const void* map, u32 shared, int x, int y, int b0, int b1, int b2,
                         u64 hint) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group.L2::cache_hint"
      " [%0, {%2, %3, %4, %5, %6}], [%1], %7;" ::"l"(map),
      "r"(shared), "r"(x), "r"(y), "r"(b0), "r"(b1), "r"(b2), "l"(hint)
      : "memory");
}

TC_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most kPending groups of this thread still read their shared memory.
template <int kPending>
TC_DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

template <int kPending>
TC_DEVICE void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Between ordinary stores to shared memory and their reading by the TMA or wgmma; by each thread
// that stored, before the barrier with the thread that issues.
TC_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8x8 matrices of 16-bit elements; lanes 8j..8j+7 give the row addresses of matrix j.
TC_DEVICE void stmatrix(u32 shared, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

TC_DEVICE void stmatrix(u32 shared, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(shared), "r"(a),
               "r"(b)
               : "memory");
}

// Transposes 8x8 elements of 16 bits: a lane holds elements (lane / 4, lane % 4 * 2 + {0, 1}).
TC_DEVICE u32 transpose_8x8(u32 value) {
  u32 out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(value));
  return out;
}

// ---- wgmma --------------------------------------------------------------------------------------

// Descriptor of an operand in shared memory under the 128-byte swizzle, at a multiple of 1024 bytes.
// K-major (each 128-byte row holds one m or n, 64 16-bit elements of K): leading is unused, stride is
// 1024 (from 8 rows to the next 8), and 16 elements of K further is + 32 bytes. MN-major (each row
// holds one k, 64 elements of M or N): leading is the bytes from 64 of M or N to the next 64, stride
// 1024 (from 8 k to the next 8), and 16 elements of K further is + 2048 bytes.
TC_DEVICE u64 wgmma_descriptor(u32 shared, u32 leading_bytes, u32 stride_bytes) {
  return (u64(1) << 62) | (u64(stride_bytes >> 4) << 32) | (u64(leading_bytes >> 4) << 16) |
         ((shared & 0x3FFFF) >> 4);
}

TC_DEVICE u64 advance(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }

// Before the first wgmma after ordinary code touched its registers.
TC_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

TC_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
TC_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads and writes of the accumulators across this place.
template <int kCount>
TC_DEVICE void keep_in_place(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

enum class WgmmaType { bf16, f16, tf32 };

// d (+)= a * b for 64 x kN outputs, 32 bytes of K deep, by a warpgroup; thread 32w + 4g + t of it
// holds, at 4j + 2h + c, row 16w + 8h + g and column 8j + 2t + c. `add` false: d is overwritten.
// kTransposeA, kTransposeB: the operand is MN-major (16-bit types only).
template <int kN>
struct Wgmma;

// The register lists of asm: %0 to %(4i + 3), and d[0] to d[4i + 3].
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
TC_WGMMA(24, 2, "12", "13", "14", "15", "16")
TC_WGMMA(32, 3, "16", "17", "18", "19", "20")
TC_WGMMA(40, 4, "20", "21", "22", "23", "24")
TC_WGMMA(48, 5, "24", "25", "26", "27", "28")
TC_WGMMA(56, 6, "28", "29", "30", "31", "32")
TC_WGMMA(64, 7, "32", "33", "34", "35", "36")
TC_WGMMA(80, 9, "40", "41", "42", "43", "44")
TC_WGMMA(96, 11, "48", "49", "50", "51", "52")
TC_WGMMA(112, 13, "56", "57", "58", "59", "60")
TC_WGMMA(128, 15, "64", "65", "66", "67", "68")
TC_WGMMA(144, 17, "72", "73", "74", "75", "76")
TC_WGMMA(160, 19, "80", "81", "82", "83", "84")
TC_WGMMA(176, 21, "88", "89", "90", "91", "92")
TC_WGMMA(192, 23, "96", "97", "98", "99", "100")
TC_WGMMA(208, 25, "104", "105", "106", "107", "108")
TC_WGMMA(224, 27, "112", "113", "114", "115", "116")
TC_WGMMA(240, 29, "120", "121", "122", "123", "124")
TC_WGMMA(256, 31, "128", "129", "130", "131", "132")

#undef TC_WGMMA
#undef TC_WGMMA_ASM

// The same for a in registers, 16 of K deep: a[0] and a[2] are of row 16w + g, columns 2t and 2t + 8,
// a[1] and a[3] of row 16w + g + 8. So neighbouring sums of 16 columns, packed, are an operand as
// they are. The registers may be written again only after a wgmma_wait that covers this product.
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
TC_WGMMA_REGISTERS(192, 23, "96", "97", "98", "99", "100", "101", "102")
TC_WGMMA_REGISTERS(256, 31, "128", "129", "130", "131", "132", "133", "134")

#undef TC_WGMMA_REGISTERS
#undef TC_WGMMA_REGISTERS_ASM

}  // namespace sm90
}  // namespace torch_cubin
