// The PTX of Hopper that sm90_skinny.cu alone uses, beside common/hopper.cuh.
#pragma once

#include "common/hopper.cuh"

namespace torch_cubin {
namespace sm90 {

constexpr u64 kEvictLast = 0x14F0000000000000ull;  // as kEvictFirst

TC_DEVICE void tma_load(u32 shared, const void* map, u32 barrier, int x, int y, u64 hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "l"(hint)
      : "memory");
}

// Brings a box to the L2 cache. It is not a read: what an earlier kernel is still writing stays
// right, so it may stand before wait_for_previous_grid.
TC_DEVICE void tma_prefetch(const void* map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(x),
               "r"(y)
               : "memory");
}

// cluster_meet in two parts, so that other work fits between them.
TC_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

TC_DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Stores 16 bytes in another block's shared memory, asynchronously: they count as 16 bytes on that
// block's mbarrier, which makes them visible to who waits for it; no other fence is needed.
TC_DEVICE void store_remote_async(u32 remote, const float* value, u32 remote_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(remote),
      "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3]), "r"(remote_barrier)
      : "memory");
}

// Waits for a phase that another block of the cluster completes.
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

// Transposes 8x8 elements of 16 bits: a lane holds elements (lane / 4, lane % 4 * 2 + {0, 1}).
TC_DEVICE u32 transpose_8x8(u32 value) {
  u32 out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(value));
  return out;
}

}  // namespace sm90
}  // namespace torch_cubin
