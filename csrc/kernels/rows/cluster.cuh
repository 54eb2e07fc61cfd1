// Clusters of blocks that share a row. Older GPUs than sm_90 have none: there the host launches
// none.
#pragma once

#include "common/ptx.cuh"

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

// The same; writes to the blocks' shared memory before it are visible after it.
TC_DEVICE void cluster_synchronize() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Writes floats to the same variable of block `rank`.
template <int kCount>
TC_DEVICE void write_to_rank(const void* shared, const float (&values)[kCount], u32 rank) {
#if __CUDA_ARCH__ >= 900
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(shared_address(shared)), "r"(rank));
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote + i * 4), "f"(values[i])
                 : "memory");
  }
#endif
}

}  // namespace torch_cubin
