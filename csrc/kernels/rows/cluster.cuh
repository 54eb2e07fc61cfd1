// Clusters of blocks that share a row. Older GPUs than sm_90 have none: there the host launches
// none.
#pragma once

#include "common/hopper.cuh"
#include "rows_params.h"

namespace torch_cubin {

TC_DEVICE u32 cluster_rank() {
  u32 rank = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// Waits for all threads of the cluster.
TC_DEVICE void cluster_meet() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// The two mbarriers at `shared`, each of which completes when one thread of the block has called
// values_expect and the bytes that it names are written. For all threads of the cluster, before
// another block writes.
TC_DEVICE void values_begin(const void* shared) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x < 2) sm90::barrier_init(shared_address(shared) + threadIdx.x * 8, 1);
  sm90::fence_barrier_init();
#endif
  cluster_meet();
}

TC_DEVICE void values_expect(const void* barrier, u32 bytes) {
#if __CUDA_ARCH__ >= 900
  sm90::barrier_expect(shared_address(barrier), bytes);
#endif
}

// Writes floats to the same variable of block `rank`, where they count on the same mbarrier. The
// threads that wait there see them without a fence: a barrier of the cluster that orders writes
// would first wait for all that the block has written to global memory.
template <int kCount>
TC_DEVICE void values_write(const void* shared, const float (&values)[kCount], u32 rank,
                            const void* barrier) {
#if __CUDA_ARCH__ >= 900
  const u32 remote = sm90::map_to_rank(shared_address(shared), rank);
  const u32 remote_barrier = sm90::map_to_rank(shared_address(barrier), rank);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                     remote + i * 4),
                 "f"(values[i]), "r"(remote_barrier)
                 : "memory");
  }
#endif
}

TC_DEVICE void values_wait(const void* barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
  sm90::barrier_wait(shared_address(barrier), parity);
#endif
}

// Values that the blocks of a cluster send one another, once.
template <int kCount>
struct Exchanged {
  float of[kMostCluster][kCount];
  u64 arrived;  // mbarrier

  // For one thread, before it calls sm90::fence_barrier_init().
  TC_DEVICE void begin() const { sm90::barrier_init(shared_address(&arrived), 1); }
  // Fills `of` with all blocks' values. All threads of the cluster have called cluster_arrive()
  // since begin().
  TC_DEVICE void send(const float (&own)[kCount], int cluster) const {
    sm90::cluster_wait();
    if (threadIdx.x == 0) values_expect(&arrived, cluster * sizeof(own));
    if (threadIdx.x < cluster) values_write(&of[cluster_rank()], own, threadIdx.x, &arrived);
    values_wait(&arrived, 0);
  }
};

template <>
struct Exchanged<0> {};

}  // namespace torch_cubin
