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

// A tensor whose rows are copied to shared memory.
struct StagedTensor {
  const void* data;  // null: none
  tc_int64 stride;
};

// The vectors of a row that this block has, of several in a cluster, in which the blocks send one
// another kOfBlocks values.
template <DType kDtype, int kSums, int kOfBlocks>
struct StagedRow {
  using Access = Vectors<static_cast<int>(kDtype)>;
  using Raw = typename Access::Raw;
  static constexpr int kVectors = kStagedVectors;
  static constexpr bool kSends = kOfBlocks > 0;
  static_assert(Access::kParts == 1);
  struct Shared {
    u64 arrived;                                             // mbarrier of all that is copied
    alignas(16) float of_warps[kSums][kStagedThreads / 32];  // of warps that are not there: 0
    Exchanged<kOfBlocks> of_blocks;
  };
  Shared& shared;
  const int cluster;
  tc_int64 row;
  int begin, vectors;  // the first, and how many

  TC_DEVICE StagedRow(Shared& shared, int columns, int cluster) : shared(shared), cluster(cluster) {
    const int all = columns / kRowVector, most = (all + cluster - 1) / cluster;
    row = blockIdx.x / cluster;
    begin = static_cast<int>(blockIdx.x % cluster) * most;
    vectors = min(most, all - begin);
  }

  // Where they begin in a tensor of 16-bit elements.
  TC_DEVICE const void* of(const StagedTensor& tensor) const {
    return static_cast<const char*>(tensor.data) + (row * tensor.stride + begin * kRowVector) * 2;
  }

  TC_DEVICE u32 address(int tensor, int i) const {
    const int vector = static_cast<int>(threadIdx.x) + i * static_cast<int>(blockDim.x);
    return shared_address(staged_vectors) + (tensor * vectors + vector) * 16;
  }

  // Begins to copy the tensors' vectors, and waits for the previous kernel. For one thread.
  template <int kTensors>
  TC_DEVICE void fetch(const StagedTensor (&tensors)[kTensors]) const {
    const u32 arrived = shared_address(&shared.arrived), bytes = vectors * 16;
    if constexpr (kSends) shared.of_blocks.begin();
    sm90::barrier_init(arrived, 1);
    sm90::fence_barrier_init();
    wait_for_previous_grid();
    int count = 0;
#pragma unroll
    for (int i = 0; i < kTensors; ++i) count += tensors[i].data != nullptr;
    sm90::barrier_expect(arrived, count * bytes);
#pragma unroll
    for (int i = 0; i < kTensors; ++i) {
      if (tensors[i].data == nullptr) continue;
      sm90::bulk_load(shared_address(staged_vectors) + i * bytes, of(tensors[i]), bytes, arrived);
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

  TC_DEVICE void put(const Raw& raw, int tensor, int i) const {
    store_shared(address(tensor, i), raw.parts[0].words);
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
    x = sum_of_warp(x);
    const auto& of_warps = shared.of_warps[call];
    if (threadIdx.x % 32 == 0) shared.of_warps[call][threadIdx.x / 32] = x;
    __syncthreads();
    float total = 0;
    for (int i = 0; i * 32 < blockDim.x; i += 4) {
      total += (of_warps[i] + of_warps[i + 1]) + (of_warps[i + 2] + of_warps[i + 3]);
    }
    return total;
  }

  // The block's part of a result's row, which is contiguous.
  TC_DEVICE RowOf result(void* tensor, int columns, int dtype) const {
    return RowOf(tensor, row * columns + begin * kRowVector, dtype);
  }
};

// Calls body(row) with the tensors' vectors in shared memory, and before(), which reads nothing
// that the previous kernel writes, while they come.
template <class Row, class Params, int kTensors, class Before, class Body>
TC_DEVICE void with_staged_row(const Params& p, const StagedTensor (&tensors)[kTensors],
                               Before&& before, Body&& body) {
  __shared__ typename Row::Shared shared;
  const Row row(shared, p.columns, Row::kSends ? p.cluster : 1);
  if (threadIdx.x == 0) row.fetch(tensors);
  before();
  wait_for_previous_kernel();
  __syncwarp();  // thread 0 had work of its own, and cluster_arrive() is for converged warps
  if (Row::kSends && p.cluster > 1) sm90::cluster_arrive();
  row.wait();
  body(row);
}

}  // namespace torch_cubin
