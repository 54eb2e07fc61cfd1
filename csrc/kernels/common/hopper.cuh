// Hopper's PTX (sm_90a), one function per instruction: mbarriers, the tensor memory accelerator
// (TMA), clusters. The tensor cores are in wgmma.cuh. Needs no CUDA or CUTLASS header.
//
// `shared` is an address in this block's shared memory (shared_address), `remote` an address in
// another block of the cluster (map_to_rank).
#pragma once

#include "ptx.cuh"

namespace torch_cubin {
namespace sm90 {

constexpr int kWarpgroup = 128;  // threads

// With TC_BOUND_NANOSECONDS (for first runs of a new kernel) a longer wait traps instead of hanging
// the GPU.
struct WaitBound {
#ifdef TC_BOUND_NANOSECONDS
  u64 start = 0;

  TC_DEVICE void check() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (start == 0) start = now;
    if (now - start > TC_BOUND_NANOSECONDS) asm volatile("trap;");
  }
#else
  TC_DEVICE void check() {}
#endif
};

// ---- mbarriers ----------------------------------------------------------------------------------

TC_DEVICE void barrier_init(u32 shared, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared), "r"(arrivals) : "memory");
}

// Required between barrier_init and the first use by other threads (of the cluster) or the TMA.
TC_DEVICE void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and expects `bytes` more from the TMA. `bytes` counts everything written to this block's
// shared memory, including multicasts from other blocks of the cluster.
TC_DEVICE void barrier_expect(u32 shared, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared), "r"(bytes)
               : "memory");
}

TC_DEVICE void barrier_arrive(u32 shared) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared) : "memory");
}

// NOTE: with an explicit .release.cluster ptxas emits MEMBAR.ALL.GPU: 0.71x of the speed.
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

// Waits until the phase with this parity has completed.
TC_DEVICE void barrier_wait(u32 shared, u32 parity) {
  while (!barrier_try(shared, parity)) {
  }
}

// barrier_wait for a thread that mostly waits. The hardware suspends the thread for up to
// kNanoseconds; polling every few dozen cycles would take issue slots and power.
TC_DEVICE void barrier_sleep(u32 shared, u32 parity) {
  constexpr u32 kNanoseconds = 1000000;
  WaitBound bound;
  for (;;) {
    u32 done;
    asm volatile(
        "{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2, %3;"
        " selp.b32 %0, 1, 0, done; }"
        : "=r"(done)
        : "r"(shared), "r"(parity), "r"(kNanoseconds)
        : "memory");
    if (done != 0) return;
    bound.check();
  }
}

// barrier_wait for a phase that another block of the cluster completes. That block's writes are
// visible afterwards.
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

// barrier_sleep for a phase that another block of the cluster completes.
TC_DEVICE void barrier_sleep_remote(u32 shared, u32 parity) {
  constexpr u32 kNanoseconds = 1000000;
  WaitBound bound;
  for (;;) {
    u32 done;
    asm volatile(
        "{ .reg .pred done; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], "
        "%2, %3;"
        " selp.b32 %0, 1, 0, done; }"
        : "=r"(done)
        : "r"(shared), "r"(parity), "r"(kNanoseconds)
        : "memory");
    if (done != 0) return;
    bound.check();
  }
}

// barrier_wait with a WaitBound, for threads that have registers left for it.
TC_DEVICE void barrier_wait_bounded(u32 shared, u32 parity) {
  WaitBound bound;
  while (!barrier_try(shared, parity)) bound.check();
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

// Maps `shared` to the same location in block `rank`, as an address for `shared::cluster`
// instructions.
TC_DEVICE u32 map_to_rank(u32 shared, u32 rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
  return remote;
}

// Asynchronous store. It counts as 16 bytes on that block's mbarrier; threads that wait for the
// mbarrier see the values without another fence.
TC_DEVICE void store_remote_async(u32 remote, const float* value, u32 remote_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(remote),
      "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3]), "r"(remote_barrier)
      : "memory");
}

// Synchronizes all threads of the cluster that have not exited, and orders their shared memory
// accesses. The threads of a warp may have diverged.
TC_DEVICE void cluster_sync_unaligned() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// cluster_sync_unaligned without memory ordering (a release to the cluster is MEMBAR.ALL.GPU).
TC_DEVICE void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  asm volatile("barrier.cluster.wait;" ::: "memory");
}

// cluster_meet split into arrive and wait, so that other work fits between them. For converged
// warps.
TC_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

TC_DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- barriers among some warps of a block -------------------------------------------------------

// `id`: 1 to 15; 0 is the barrier of __syncthreads(). `threads`: the number that sync or arrive.
TC_DEVICE void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

TC_DEVICE void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- registers ----------------------------------------------------------------------------------

// Executed by all warps of a warpgroup. kRegisters is a multiple of 8. ptxas ignores it unless the
// kernel has __launch_bounds__(n, 1).
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

// Cache hints: the policies that createpolicy.fractional.L2 creates for evict_normal, evict_first
// and evict_last with fraction 1.
constexpr u64 kEvictNormal = 0x10F0000000000000ull;
constexpr u64 kEvictFirst = 0x12F0000000000000ull;
constexpr u64 kEvictLast = 0x14F0000000000000ull;

// Prefetches a box to the L2 cache. L2 stays coherent with writes of an earlier kernel, so this may
// precede wait_for_previous_grid.
TC_DEVICE void tma_prefetch(const void* map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(x),
               "r"(y)
               : "memory");
}

TC_DEVICE void tma_prefetch(const void* map, int x, int y, int b0, int b1, int b2) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(map),
      "r"(x), "r"(y), "r"(b0), "r"(b1), "r"(b2)
      : "memory");
}

// Copies a box of the tensor to `shared`; `barrier` counts its bytes. Coordinates start with the
// innermost dim.
TC_DEVICE void tma_load(u32 shared, const void* map, u32 barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
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

// tma_load to the same address in every block of `mask`; each block's own barrier counts the bytes.
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

// tma_store that adds floats to those in global memory, in the L2 cache. Subnormal numbers are kept
// (seen on an H200).
TC_DEVICE void tma_add(const void* map, u32 shared, int x, int y, u64 hint) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group.L2::cache_hint"
      " [%0, {%2, %3}], [%1], %4;" ::"l"(map),
      "r"(shared), "r"(x), "r"(y), "l"(hint)
      : "memory");
}

TC_DEVICE void tma_add(const void* map, u32 shared, int x, int y, int b0, int b1, int b2,
                       u64 hint) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group.L2::cache_hint"
      " [%0, {%2, %3, %4, %5, %6}], [%1], %7;" ::"l"(map),
      "r"(shared), "r"(x), "r"(y), "r"(b0), "r"(b1), "r"(b2), "l"(hint)
      : "memory");
}

// Copies contiguous bytes. Both addresses and `bytes` are multiples of 16.
TC_DEVICE void bulk_load(u32 shared, const void* global, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// bulk_load from this block's shared memory to that of another block of the cluster, whose barrier
// counts the bytes.
TC_DEVICE void bulk_copy_remote(u32 remote, u32 shared, u32 bytes, u32 remote_barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(remote),
      "r"(shared), "r"(bytes), "r"(remote_barrier)
      : "memory");
}

// Uses the same commit and wait as tma_store.
TC_DEVICE void bulk_store(void* global, u32 shared, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared), "r"(bytes)
               : "memory");
}

// bulk_store that adds floats to those in global memory.
TC_DEVICE void bulk_add(float* global, u32 shared, u32 bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
      "r"(shared), "r"(bytes)
      : "memory");
}

TC_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most kPending groups of this thread still read their shared memory.
template <int kPending>
TC_DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

template <int kPending>
TC_DEVICE void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Makes ordinary stores to shared memory visible to the TMA and wgmma. Each storing thread executes
// it before the barrier with the issuing thread.
TC_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// fence_async_proxy for global memory too: orders the TMA's stores and additions with ordinary
// loads and stores.
TC_DEVICE void fence_async_proxy_everywhere() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Stores four 8x8 matrices of 16-bit elements; lanes 8j..8j+7 give the row addresses of matrix j.
TC_DEVICE void stmatrix(u32 shared, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Transposes an 8x8 matrix of 16-bit elements; a lane holds elements
// (lane / 4, lane % 4 * 2 + {0, 1}).
TC_DEVICE u32 transpose_8x8(u32 value) {
  u32 out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(value));
  return out;
}

}  // namespace sm90
}  // namespace torch_cubin
