// Sums of columns over rows that the blocks of a cluster share, for one launch: the blocks send
// theirs to the cluster's first, which adds them in their order.
//
// Eight adjacent threads of each block have the columns of one row, others other rows.
#pragma once

#include "cluster.cuh"
#include "columns.cuh"

namespace torch_cubin {

// kKinds sums of each column, by blocks of kBlock threads with kElements columns each.
template <int kBlock, int kKinds, int kElements = kRowVector>
struct ClusterColumns {
  static constexpr int kColumns = kThreadsAcross * kElements;  // of a cluster
  static constexpr int kWarps = kBlock / 32;
  static constexpr int kRows = kBlock / kThreadsAcross;  // of a block at a time
  static_assert(kKinds * kColumns <= kBlock);
  struct Shared {
    alignas(16) float of_warps[kKinds][kWarps][kColumns];
    float of_blocks[kMostCluster][kKinds][kColumns];
    u64 arrived;  // mbarrier of the first block's of_blocks
  };
  const int cluster;  // blocks

  static TC_DEVICE Shared& shared() {
    __shared__ Shared own;
    return own;
  }

  // For all threads of the cluster.
  explicit TC_DEVICE ClusterColumns(int cluster) : cluster(cluster) {
#if __CUDA_ARCH__ >= 900
    if (cluster == 1) return;
    if (threadIdx.x == 0) {
      sm90::barrier_init(shared_address(&shared().arrived), 1);
      sm90::fence_barrier_init();
    }
    __syncwarp();
    sm90::cluster_arrive();
#endif
  }

  // Calls body(kind, column, sum) in the first block, with a column of the cluster's. `sums`: of
  // the thread's rows. For all threads of the cluster.
  template <class Body>
  TC_DEVICE void join(float (&sums)[kKinds][kElements], Body&& body) const {
    auto& [of_warps, of_blocks, arrived] = shared();
    const int first = threadIdx.x % kThreadsAcross * kElements;
#pragma unroll
    for (int kind = 0; kind < kKinds; ++kind) {
#pragma unroll
      for (int lanes = kThreadsAcross; lanes < 32; lanes *= 2) {
#pragma unroll
        for (float& sum : sums[kind]) sum += __shfl_xor_sync(~0u, sum, lanes);
      }
      if (threadIdx.x % 32 >= kThreadsAcross) continue;
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        of_warps[kind][threadIdx.x / 32][first + j] = sums[kind][j];
      }
    }
    __syncthreads();
    const int kind = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
    const bool has = kind < kKinds;
    float sum[1] = {0};
    if (has) {
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) sum[0] += of_warps[kind][warp][column];
    }
#if __CUDA_ARCH__ >= 900
    if (cluster > 1) {
      sm90::cluster_wait();
      const int rank = cluster_rank();
      if (threadIdx.x == 0 && rank == 0) {
        values_expect(&arrived, cluster * kKinds * kColumns * sizeof(float));
      }
      if (has) values_write(&of_blocks[rank][kind][column], sum, 0, &arrived);
      if (rank > 0) return;
      values_wait(&arrived, 0);
      sum[0] = 0;
      for (int block = 0; has && block < cluster; ++block) sum[0] += of_blocks[block][kind][column];
    }
#endif
    if (has) body(kind, column, sum);
  }
};

}  // namespace torch_cubin
