// Rows of 16-bit elements by vectors, each in the shared memory of a block, or in parts in that of
// a cluster's blocks: one thread copies it there in bulk, and every pass reads it there. So all of
// its bytes are loaded at once, and no registers wait for them or hold them.
//
// A block has a thread for kStagedVectors vectors, rounded up to whole warps.
#pragma once

#include "common/hopper.cuh"
#include "rows.cuh"

namespace torch_cubin {

// NOTE: copies to addresses that are no multiples of 32 bytes take longer.
extern __shared__ __align__(128) FourWords staged_vectors[];

// What the threads of a block exchange.
template <int kSums>
struct StagedShared {
  u64 arrived;                                             // mbarrier of all that is copied
  alignas(16) float of_warps[kSums][kStagedThreads / 32];  // of warps that are not there: 0
};

// Values that the blocks of a cluster send one another, once.
template <int kCount>
struct Exchanged {
  float of[kMostCluster][kCount];
  u64 arrived;  // mbarrier

  // For the thread that calls StagedRow::fetch(), before it.
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

// The vectors of a row that this block has, of several in a cluster.
struct StagedPart {
  tc_int64 row;
  int begin, count;

  TC_DEVICE StagedPart(int columns, int cluster) {
    const int vectors = columns / kRowVector, most = (vectors + cluster - 1) / cluster;
    row = blockIdx.x / cluster;
    begin = static_cast<int>(blockIdx.x % cluster) * most;
    count = min(most, vectors - begin);
  }
  // Where they begin in a tensor of 16-bit elements.
  TC_DEVICE const void* of(const void* tensor, tc_int64 stride) const {
    return static_cast<const char*>(tensor) + (row * stride + begin * kRowVector) * 2;
  }
};

template <DType kDtype, int kSums>
struct StagedRow {
  using Access = Vectors<static_cast<int>(kDtype)>;
  using Raw = typename Access::Raw;
  using Shared = StagedShared<kSums>;
  static_assert(Access::kParts == 1);
  Shared& shared;
  const int vectors;  // of the block

  TC_DEVICE u32 address(int tensor, int i) const {
    const int vector = static_cast<int>(threadIdx.x) + i * static_cast<int>(blockDim.x);
    return shared_address(staged_vectors) + (tensor * vectors + vector) * 16;
  }

  // Begins to copy the tensors' vectors, and waits for the previous kernel. For one thread.
  template <int kTensors>
  TC_DEVICE void fetch(const void* const (&tensors)[kTensors]) const {
    const u32 arrived = shared_address(&shared.arrived), bytes = vectors * 16;
    sm90::barrier_init(arrived, 1);
    sm90::fence_barrier_init();
    wait_for_previous_grid();
    int count = 0;
#pragma unroll
    for (int i = 0; i < kTensors; ++i) count += tensors[i] != nullptr;
    sm90::barrier_expect(arrived, count * bytes);
#pragma unroll
    for (int i = 0; i < kTensors; ++i) {
      if (tensors[i] == nullptr) continue;
      sm90::bulk_load(shared_address(staged_vectors) + i * bytes, tensors[i], bytes, arrived);
    }
  }

  // Waits for what fetch() copies. For all threads, before any sum.
  TC_DEVICE void wait() const {
    if (threadIdx.x < kStagedThreads / 32) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) shared.of_warps[i][threadIdx.x] = 0;
    }
    __syncthreads();
    sm90::barrier_wait(shared_address(&shared.arrived), 0);
  }

  TC_DEVICE void get(Raw& raw, int tensor, int i) const {
    load_shared(raw.parts[0].words, address(tensor, i));
  }

  // Calls body(i, column) for the thread's vectors, columns counted from the block's first. Half of
  // them are read without a test: csrc/ops/rows/kernels.cpp asserts that no block has fewer.
  template <class Body>
  TC_DEVICE void for_each(Body&& body) const {
#pragma unroll
    for (int i = 0; i < kStagedVectors; ++i) {
      const int vector = static_cast<int>(threadIdx.x) + i * static_cast<int>(blockDim.x);
      if (i < kStagedVectors / 2 || vector < vectors) body(i, vector * kRowVector);
    }
  }

  // The sum over the block's threads, in an order that their number fixes. Each call has a number
  // of its own.
  TC_DEVICE float sum(float x, int call) const {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    const auto& of_warps = shared.of_warps[call];
    if (threadIdx.x % 32 == 0) shared.of_warps[call][threadIdx.x / 32] = x;
    __syncthreads();
    float total = 0;
    for (int i = 0; i * 32 < blockDim.x; i += 4) {
      total += (of_warps[i] + of_warps[i + 1]) + (of_warps[i + 2] + of_warps[i + 3]);
    }
    return total;
  }
};

}  // namespace torch_cubin
