// What the blocks of the products on Hopper have in common: how they start, which parts of a tile
// they load for their cluster, how consumers free a stage, and how they store the sums of a tile.
// The loops over tiles and stages are each kernel's own.
//
// NOTE: the loads of a stage, and the choice of the thread that frees it, stay in each kernel:
// moved here they gave ptxas another order of the same statements, and the kernels other code.
#pragma once

#include "sm90_epilogue.cuh"
#include "sm90_tiles.cuh"

namespace torch_cubin {
namespace sm90 {

// Waits until all threads of the block, or of its cluster, have come here: they then see the
// barriers that the first thread of each block has initialized.
TC_DEVICE void meet_at_start(bool in_cluster) {
  if (in_cluster) {
    __syncwarp();
    cluster_meet();
  } else {
    __syncthreads();
  }
}

// True for one lane of a warp, all lanes of which are here. ptxas knows that it is one, and needs
// no loop over lanes around each TMA load (H200: TN 64x128 1024x1024x11992 0.82 -> 0.90 of cuBLAS's
// speed, TN 256x192 4608x1152x16384 0.86 -> 0.94, NN ping-pong 8192x1280x1280 0.99 -> 1.01).
TC_DEVICE bool elect_one() {
  u32 elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }"
               : "=r"(elected));
  return elected != 0;
}

constexpr int kStartBarrier = 8;  // a named one: kernels have those below for themselves

// The start of a block that does not wait for other blocks there: a thread of warp 0 initializes
// the barriers, and its warp waits for no other; the other producers and the consumers wait for it.
// NOTE: all who wait do so in one place: synccheck takes warps that wait for the same barrier at
// different instructions for divergent ones.
template <int kProducers, int kConsumers, class Initialize>
TC_DEVICE void start_alone(int warp, const Initialize& initialize) {
  constexpr int kThreads = 32 * kProducers + kWarpgroup * kConsumers;
  if (warp == 0) {
    if (elect_one()) initialize();
    __syncwarp();
    named_arrive(kStartBarrier, kThreads);
  } else if (warp < kProducers || warp >= 4) {
    named_sync(kStartBarrier, kThreads);
  }
}

// The parts of A's and B's tiles that the block of a rank loads.
TC_DEVICE Share share_of_a(const ClusterShape& cluster, int rank) {
  return {cluster.along_n, cluster.place_along_n(rank), cluster.same_rows(rank)};
}
TC_DEVICE Share share_of_b(const ClusterShape& cluster, int rank) {
  return {cluster.along_m, cluster.place_along_m(rank), cluster.same_columns(rank)};
}

// Arrives at the barrier `empty` in the cluster's block `target`, if this thread is one that frees.
TC_DEVICE void free_stage(bool frees, u32 empty, u32 target) {
  if (frees) barrier_arrive_remote(map_to_rank(empty, target));
}

// Applies the epilogue to the sums of a warp's rows, and stores them. finishes: kSm90Finish, in a
// register or not. m: the first row; each next block of sums is 64 rows below.
template <class C>
TC_DEVICE void finish_tile(const Sm90MatmulParams& p, bool finishes, u32 staging, u32 bias,
                           int group, int& turn, int m, const Work& w,
                           float (&sum)[C::kBlocksM][C::kTileN / 2]) {
  if (finishes) {
    wait_for_bias(group);
    if (p.flags & kSm90Activate) {
      finish_and_store<C>(p, staging, bias, turn, m, w, sum);
      return;
    }
    add_bias<C>(p, bias, sum);
  }
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) {
    if (C::kElement == 2 && (p.flags & kSm90Sums)) {
      store_rows<Widened<C>>(p, staging, turn, m + 64 * i, w, sum[i]);
    } else if (p.flags & kSm90General) {
      finish_rows<C>(p, staging, m + 64 * i, w, sum[i]);
    } else {
      store_rows<C>(p, staging, turn, m + 64 * i, w, sum[i]);
    }
  }
}

}  // namespace sm90
}  // namespace torch_cubin
