// Matrix product on Hopper whose K is summed in equal parts: each from zero, added in their order.
//
// Under batch_invariant() the bits of a row may not depend on the number of rows. sm90_skinny.cu
// splits the K of few rows over the blocks of a cluster, so that more multiprocessors read the
// weights, and adds the parts in order, as finish.cu does for some more rows, whose parts sm90.cu
// sums; this kernel gives the same sums for any number of rows. A
// consumer has two sets of accumulators: the sum of the part that wgmma adds to, and that of the
// parts before it. So tiles have at most 96 of each for a thread.
//
// The producer, the clusters, the tile scheduler, the epilogue and the layout of shared memory are
// sm90.cu's, which describes them. Sm90MatmulParams is, too; of it, split_blocks is the number of k
// blocks of a part, of which k_blocks is a multiple. Nothing is streamed, paired, read by threads
// or transposed.
#include "common/uniform.cuh"
#include "sm90_block.cuh"
#include "sm90_lone.cuh"
#include "sm90_producer.cuh"
#include "sm90_round.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

// Columns of the widest tile whose loop is unrolled by the ring (H200: 1024^3 by 64x128 5.57 us, so
// unrolled 5.61).
constexpr int kWidestRound = 64;

// ---- producer -----------------------------------------------------------------------------------

// The first thread loads A and says what there is to do, the other one loads B; one alone does all.
// `w` is the first item, if there is any.
template <class C>
TC_DEVICE void produce(const Sm90MatmulParams& p, u32 shared, u32 full, u32 empty, Work* ring,
                       bool first, Schedule<C>& schedule, Work& w, bool any) {
  const bool of_a = C::kProducers == 1 || first, of_b = C::kProducers == 1 || !first;
  int number = 0;
  const ClusterShape& cluster = schedule.shape;
  const Share share_a = share_of_a(cluster, schedule.rank);
  const Share share_b = share_of_b(cluster, schedule.rank);
  const bool batched = p.flags & kSm90Batched;
  Position at;
  for (; any; any = schedule.get(w)) {
    begin_sooner<C>(p, w);
    barrier_wait_bounded(empty + 8 * at.stage, at.phase ^ 1);
    if (of_a) ring[number++ % C::kRing] = w;
    load_tile<C>(p, shared, full, empty, of_a, of_b, share_a, share_b, batched, w, w.k_count, 0,
                 C::kTileK, at);
  }
  wait_for_previous_grid();  // of a block without work
  barrier_wait_bounded(empty + 8 * at.stage, at.phase ^ 1);
  if (of_a) ring[number % C::kRing].k_count = 0;
  barrier_arrive(full + 8 * at.stage);
}

// ---- consumers ----------------------------------------------------------------------------------

template <class C>
TC_DEVICE void consume(const Sm90MatmulParams& p, u32 shared, u32 full, u32 empty, const Work* ring,
                       int warp) {
  int stage = 0, number = 0, turn = 0;
  u32 phase = 0;
  const int group = warp / 4;
  // Frees a stage in this block and in those that share a tile with it: one lane of the warpgroup
  // per block, spread over its warps.
  const ClusterShape cluster(p.flags);
  const int source = threadIdx.x % 32 * 4 + warp % 4;
  const bool frees = source < cluster.sources();
  const u32 target = cluster_rank() ^ cluster.source(source);
  [[maybe_unused]] const u32 freed = map_to_rank(empty, target);
  bool leads = C::kConsumers == 2 && group == 0;
  const u32 staging = shared + C::kStaging + warp * C::kWarpBytes;
  const u32 bias = shared + C::kBias + group * (C::kTileN * C::kElement);
  const u64 a0 = wgmma_descriptor(shared + group * 8192, 8192, 1024);

  if (C::kConsumers == 2 && group == 1) named_sync(kSkewBarrier, 2 * kWarpgroup);
  for (;; ++number) {
    barrier_wait(full + 8 * stage, phase);
    const Work& w = ring[number % C::kRing];
    if (w.k_count == 0) break;
    if (p.flags & kSm90Finish) request_bias<C>(p, bias, group, w.n0);
    float sum[1][C::kTileN / 2], total[1][C::kTileN / 2];
#pragma unroll
    for (int i = 0; i < C::kTileN / 2; ++i) total[0][i] = 0.0f;
#pragma unroll 1
    for (int parts = w.k_count / p.split_blocks; parts > 0; --parts) {
      int k_count = p.split_blocks, previous = stage;
      const auto next_stage = [&] {
        previous = stage;
        if (++stage == C::kStages) {
          stage = 0;
          phase ^= 1;
        }
      };
      const auto step = [&](bool adds) {
        // As in sm90.cu: ptxas does not compute these addresses after the wait.
        constexpr u64 kHigh = u64{0xffffffff} << 32;
        const u32 to_b = (C::kABytes - group * 8192) >> 4;
        const u32 low = uniform(static_cast<u32>(a0) + stage * (C::kStageBytes >> 4));
        barrier_wait(full + 8 * stage, phase);
        multiply<C>(sum, (a0 & kHigh) | low, (a0 & kHigh) | (low + to_b), adds);
        wgmma_wait<1>();
        free_stage(frees && adds, empty + 8 * previous, target);
        next_stage();
        --k_count;
      };
      bool begun = false;
      if constexpr (C::kConsumers == 1 && C::kTileN <= kWidestRound) {
#pragma unroll 1
        for (; stage != 0 && k_count > 0; begun = true) step(begun);
#pragma unroll 1
        for (; k_count >= C::kStages; k_count -= C::kStages) {
          multiply_round<C>(sum, a0, begun, full, phase, frees, freed);
          begun = true;
          phase ^= 1;
          previous = C::kStages - 1;
        }
      }
      if (!begun) step(false);
#pragma unroll 1
      while (k_count > 0) {
        step(true);
        if (leads) {
          named_arrive(kSkewBarrier, 2 * kWarpgroup);
          leads = false;
        }
      }
      wgmma_wait<0>();
      keep_in_place(sum[0]);
      free_stage(frees, empty + 8 * previous, target);
#pragma unroll
      for (int i = 0; i < C::kTileN / 2; ++i) total[0][i] += sum[0][i];
    }
    if (leads) {
      named_arrive(kSkewBarrier, 2 * kWarpgroup);
      leads = false;
    }
    const int m = w.m0 + group * 64 + warp % 4 * 16;
    finish_tile<C>(p, p.flags & kSm90Finish, staging, bias, group, turn, m, w, total);
  }
  if (leads) named_arrive(kSkewBarrier, 2 * kWarpgroup);  // there was no tile
  if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();
}

template <class C>
TC_DEVICE void run(const Sm90MatmulParams& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const u32 full = shared + C::kBarriers, empty = full + 8 * C::kStages;
  static_assert(sizeof(Work) == 64 && C::kRing > C::kStages);
  auto ring = reinterpret_cast<Work*>(memory + C::kBarriers + 16 * C::kStages + 16);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const bool together = p.flags & (3 << kSm90AlongN | 3 << kSm90AlongM);

  const auto initialize = [&] {
    if (shared % 1024 != 0) asm volatile("trap;");
    prefetch_tensor_map(&p.a);
    prefetch_tensor_map(&p.b);
    if (!(p.flags & (kSm90General | kSm90OutUnaligned))) prefetch_tensor_map(&p.out_map);
    for (int s = 0; s < C::kStages; ++s) {
      barrier_init(full + 8 * s, C::kProducers);
      barrier_init(empty + 8 * s, C::kConsumers * ClusterShape(p.flags).sources());
    }
    fence_barrier_init();
  };
  // The first item of a producer, which it finds while another warp initializes the barriers.
  Schedule<C> schedule(p);
  Work work;
  bool any = false;
  if (is_lone<C>(p)) {
    start_alone<C::kProducers, C::kConsumers>(warp, initialize);
  } else {
    if (warp < C::kProducers) {
      any = schedule.get(work);
    } else if (warp == C::kProducers) {
      if (elect_one()) initialize();
      __syncwarp();
    }
    meet_at_start(together);
  }

  // The next grid's blocks may start as soon as they fit; they wait for the end of this grid.
  launch_next_grid();
  if (warp < 4) {
    if constexpr (C::kConsumers > 1) fewer_registers<40>();
    if (warp < C::kProducers && elect_one()) {
      if (is_lone<C>(p)) {
        produce_lone<C>(p, shared, full, empty, ring, warp == 0);
      } else {
        produce<C>(p, shared, full, empty, ring, warp == 0, schedule, work, any);
      }
    } else {
      wait_for_previous_grid();
    }
    __syncwarp();
  } else {
    if constexpr (C::kConsumers > 1) more_registers<232>();
    wait_for_previous_grid();
    consume<C>(p, shared, full, empty, ring, warp - 4);
  }
  // A block must not exit while another block of its cluster may still write to its shared memory.
  if (together) cluster_meet();
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, 1)
    TC_KERNEL(const __grid_constant__ Sm90MatmulParams p) {
  using C = Config<DType::TC_DTYPE, false, false, TC_TILE_M, TC_TILE_N, TC_STAGES, TC_CONSUMERS,
                   false, false, false>;
  static_assert(C::kThreads == TC_THREADS && C::kSharedBytes == TC_DYNAMIC_SHARED);
  static_assert(C::kTileK == TC_TILE_K && C::kBlocksM == 1, "128 bytes of K, 64 rows a warpgroup");
  static_assert(C::kTileN <= 192, "two sets of accumulators");
  run<C>(p);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sm90_matmul_parts_{d.short}_nt_{t.tile.0}x{t.tile.1}", "kind": "sm90_parts",
   "layout": "nt", "tile": "{t.tile}", "block": ["{t.threads}", 1, 1], "stages": "{t.stages}",
   "dynamic_shared": "{t.shared}", "cost": {}, "streams": 0, "splits_k": 0, "reads": 0, "swaps": 0,
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_CONSUMERS": "{t.consumers}"},
   "for": {
    "d": "bf16 f16",
    "t": [
     ["tile", "stages", "consumers", "threads", "shared"],
     [[128, 192, 64],  4, 2, 384, 230736],
     [[128, 160, 64],  5, 2, 384, 218336],
     [[128, 128, 64],  6, 2, 384, 230512],
     [[64, 128, 64],   8, 1, 256, 230800],
     [[64, 64, 64],   10, 1, 256, 197936],
     [[64, 32, 64],   14, 1, 256, 206128]]}}]}
*/
