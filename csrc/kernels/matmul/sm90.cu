// Matrix product on Hopper: a persistent, warp-specialized kernel with TMA and wgmma.
//
// A block has one or two producer threads, which keep loads of kStages tiles of A and B in flight,
// and one to three consumer warpgroups of 64 rows of the tile each. Clusters of two, four or
// eight blocks share A's tile, B's, or both: each block loads a part and multicasts it (the blocks
// then stay within kStages of one another). Unaligned rows, which the TMA cannot read, are read by
// the producer's warpgroup if a copy of the operand would cost more (sm90_read.cuh). TF32 whose A
// is not contiguous along K goes through the consumers' registers (sm90_registers.cuh).
//
//   shared memory: kStages x (A tile, B tile) | one staging buffer per warp | full, empty barriers
//   full[s]: the producers' arrivals and all bytes of the stage
//   empty[s]: one arrival per consumer warpgroup (per warp, if A goes through registers) of every
//     block that receives some of this block's loads
//
// Measured on an H200, relative to the speed (benchmarks/NOTES.md has more): one wgmma group stays
// in flight while the next is issued (without it 0.985); the second warpgroup starts one k block
// late, once (+1.5%, although by the clock both end the first tile together); K runs backwards in
// every other tile (less DRAM traffic, hence less power); an out that is larger than the L2 cache
// is stored evict-first.
//
// The last, partial wave of tiles is streamed: its k blocks are split evenly, so that most of these
// tiles have parts in several clusters. The cluster with the last part adds the others to its own
// in a fixed order, so the same inputs give the same bits. Its wait is bounded: if the blocks of a
// launch do not all run at the same time, the part that completes last finishes the tile.
//
// The kernel table at the end makes this file longer than most.
#include "common/uniform.cuh"
#include "sm90_block.cuh"
#include "sm90_lone.cuh"
#include "sm90_producer.cuh"
#include "sm90_read.cuh"
#include "sm90_registers.cuh"
#include "sm90_round.cuh"
#include "sm90_row_sums.cuh"
#include "sm90_split.cuh"
#include "sm90_transposed.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

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
  bool backwards = false;
  Position at;
  for (; any; any = schedule.get(w)) {
    begin_sooner<C>(p, w);
    int k = (backwards ? schedule.k_begin + w.k_count - 1 : schedule.k_begin) * C::kTileK;
    const int step = backwards ? -C::kTileK : C::kTileK;
    w.k_first = k / C::kTileK;
    w.k_step = backwards ? -1 : 1;
    if (p.flags & kSm90Serpentine) backwards = !backwards;
    barrier_wait_bounded(empty + 8 * at.stage, at.phase ^ 1);
    if (of_a) ring[number++ % C::kRing] = w;
    load_tile<C>(p, shared, full, empty, of_a, of_b, share_a, share_b, batched, w, w.k_count, k,
                 step, at);
  }
  wait_for_previous_grid();  // of a block without work
  barrier_wait_bounded(empty + 8 * at.stage, at.phase ^ 1);
  if (of_a) ring[number % C::kRing].k_count = 0;
  barrier_arrive(full + 8 * at.stage);
#ifdef TC_BOUND_NANOSECONDS
  for (int i = 1; i < C::kStages; ++i) {  // traps if consumers hang
    at.next<C>();
    barrier_wait_bounded(empty + 8 * at.stage, at.phase ^ 1);
  }
#endif
}

// The producer if its threads read one operand, or both.
template <class C>
TC_DEVICE void produce_by_reading(const Sm90MatmulParams& p, u32 shared, u32 full, u32 empty,
                                  Work* ring) {
  Schedule<C> schedule(p);
  const Share alone = {0, 0, 1};
  const bool read_a = p.flags & kSm90ReadA, read_b = p.flags & kSm90ReadB;
  const u32 by_tma = (read_a ? 0 : C::kABytes) + (read_b ? 0 : C::kBBytes);
  const bool asks = threadIdx.x == 0;
  int stage = 0, number = 0;
  u32 phase = 0;
  auto next_stage = [&] {
    if (++stage == C::kStages) {
      stage = 0;
      phase ^= 1;
    }
  };
  Work w;
  bool any = schedule.get(w);
  wait_for_previous_grid();
  for (; any; any = schedule.get(w)) {
#pragma unroll 1
    for (int i = 0; i < w.k_count; ++i) {
      int k = (schedule.k_begin + i) * C::kTileK;
      u32 arrived = full + 8 * stage, to = shared + stage * C::kStageBytes;
      // NOTE: a wait separates all loads from their uses. Without a branch in between, ptxas uses
      // each vector before it loads the next one, to save registers.
      Reader<C::kAMnMajor, C::kTileM, C::kTileK> a;
      Reader<C::kBMnMajor, C::kTileN, C::kTileK> b;
      if (read_a) a.request(p.a_rows, w.m0, p.m, k, p.k);
      if (read_b) b.request(p.b_rows, w.n0, p.n, k, p.k);
      barrier_wait_bounded(empty + 8 * stage, phase ^ 1);
      if (asks) {
        if (i == 0) ring[number % C::kRing] = w;
        barrier_expect(arrived, by_tma);
        if (!read_a) {
          load_operand<C::kAMnMajor, C::kTileM, C::kTileK>(p.a, to, arrived, alone, false, w.m0, k,
                                                           w);
        }
        if (!read_b) {
          load_operand<C::kBMnMajor, C::kTileN, C::kTileK>(p.b, to + C::kABytes, arrived, alone,
                                                           false, w.n0, k, w);
        }
      }
      __syncwarp();
      if (read_a) a.store(p.a_rows, to, w.m0, p.m, k, p.k);
      if (read_b) b.store(p.b_rows, to + C::kABytes, w.n0, p.n, k, p.k);
      fence_async_proxy();
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(arrived);
      next_stage();
    }
    ++number;
  }
  barrier_wait_bounded(empty + 8 * stage, phase ^ 1);
  if (asks) {
    ring[number % C::kRing].k_count = 0;
    barrier_arrive(full + 8 * stage);
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(full + 8 * stage);
}

// ---- consumers ----------------------------------------------------------------------------------

// Whether the loop over K is unrolled by the ring of stages (sm90_round.cuh).
template <class C>
constexpr bool kHasRounds = C::kConsumers == 1 && !C::kReads && C::kElement == 2;

template <class C>
TC_DEVICE void consume(const Sm90MatmulParams& p, u32 shared, u32 full, u32 empty, u32 word,
                       const Work* ring, int warp) {
  int stage = 0, number = 0, turn = 0;
  u32 phase = 0;
  int group = warp / 4;
  // Frees a stage in this block and in those that share a tile with it: one lane of the warpgroup
  // per block, spread over its warps. With sums of rows each warp reads the stage itself, so one
  // lane of every warp arrives per block.
  const ClusterShape cluster(p.flags);
  const bool rows_wanted = C::kRowSums && p.row_sums != nullptr;
  int source = rows_wanted ? threadIdx.x % 32 : threadIdx.x % 32 * 4 + warp % 4;
  bool frees = source < cluster.sources();
  u32 target = cluster_rank() ^ cluster.source(source);
  [[maybe_unused]] const u32 freed = map_to_rank(empty, target);
  bool finishes = p.flags & kSm90Finish;
  const bool transposes = C::kSwaps && (p.flags & kSm90Transposed);
  bool leads = C::kConsumers == 2 && group == 0;
  u32 staging = shared + C::kStaging + warp * C::kWarpBytes;
  u32 bias = shared + C::kBias + group * (C::kTileN * C::kElement);
  u64 a0 = wgmma_descriptor(shared + group * C::kBlocksM * 8192, 8192, 1024);
  u64 b0 = wgmma_descriptor(shared + C::kABytes, 8192, 1024);

  if (C::kConsumers == 2 && group == 1) named_sync(kSkewBarrier, 2 * kWarpgroup);
  for (;; ++number) {
    barrier_wait(full + 8 * stage, phase);
    const Work& w = ring[number % C::kRing];
    int k_count = w.k_count;
    if (k_count == 0) break;
    // With a long epilogue the second warpgroup delays its last kStages k blocks until the first
    // one has finished its own; with an activation this saves 1% of the time. With few k blocks one
    // warpgroup could be two tiles ahead of the other, which the barrier cannot distinguish.
    const bool takes_turns =
        C::kConsumers == 2 && (p.flags & kSm90Activate) && k_count >= 2 * C::kStages;
    const int waits_at = takes_turns && group == 1 ? C::kStages : 0;
    if (finishes) request_bias<C>(p, bias, group, w.n0);
    [[maybe_unused]] float bias_of_rows[C::kBlocksM][2];
    if constexpr (C::kSwaps) {
      if (transposes) {
        load_bias_of_rows<C>(p, w.m0 + group * C::kBlocksM * 64 + warp % 4 * 16, bias_of_rows);
      }
    }
    float sum[C::kBlocksM][C::kTileN / 2];
    // The tiles of a row divide the k blocks whose rows of A they add, while the tensor cores
    // multiply.
    const int of_row = w.n0 / C::kTileN;
    const bool adds = rows_wanted && of_row < p.row_parts;
    int until_turn = adds ? RowSums<C>::until_turn(w, of_row, p.row_parts) : 0;
    [[maybe_unused]] RowSums<C> rows;
    [[maybe_unused]] float row_totals[C::kBlocksM];
    rows.clear();
    auto add_rows = [&] {
      if constexpr (C::kRowSums) {
        if (adds && --until_turn < 0) {
          until_turn = p.row_parts - 1;
          rows.add(shared + stage * C::kStageBytes + group * C::kBlocksM * 8192);
          __syncwarp();
        }
      }
    };
    int previous = stage;
    auto next_stage = [&] {
      previous = stage;
      if (++stage == C::kStages) {
        stage = 0;
        phase ^= 1;
      }
    };
    bool begun = false;
    if constexpr (kHasRounds<C>) {
      if (stage == 0 && !rows_wanted) {
#pragma unroll 1
        for (; k_count >= C::kStages; k_count -= C::kStages) {
          multiply_round<C>(sum, a0, begun, full, phase, frees, freed);
          begun = true;
          phase ^= 1;
          previous = C::kStages - 1;
        }
      }
    }
    if (!begun) {
      multiply<C>(sum, a0 + stage * (C::kStageBytes >> 4), b0 + stage * (C::kStageBytes >> 4), 0);
      add_rows();
      next_stage();
      --k_count;
    }
#pragma unroll 1
    for (; k_count > 0; --k_count) {
      if (k_count == waits_at) {
        wgmma_wait<0>();
        free_stage(frees, empty + 8 * previous, target);
        named_sync(kSkewBarrier, 2 * kWarpgroup);
      }
      // ptxas computes descriptors after the wait, although they do not depend on it, in registers
      // of threads, which each product then moves to uniform ones. So their low words come from a
      // REDUX before it, which ptxas does not repeat.
      constexpr u64 kHigh = u64{0xffffffff} << 32;
      const u32 to_b = (C::kABytes - group * C::kBlocksM * 8192) >> 4;
      const u32 low = uniform(static_cast<u32>(a0) + stage * (C::kStageBytes >> 4));
      barrier_wait(full + 8 * stage, phase);
      multiply<C>(sum, (a0 & kHigh) | low, (a0 & kHigh) | (low + to_b), 1);
      add_rows();
      wgmma_wait<1>();
      free_stage(frees && k_count != waits_at, empty + 8 * previous, target);
      if (leads) {
        named_arrive(kSkewBarrier, 2 * kWarpgroup);
        leads = false;
      }
      next_stage();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) keep_in_place(sum[i]);
    free_stage(frees, empty + 8 * previous, target);
    order_columns<C>(sum, w.n0);
    if (takes_turns && group == 0) named_arrive(kSkewBarrier, 2 * kWarpgroup);
    if (leads) {
      named_arrive(kSkewBarrier, 2 * kWarpgroup);
      leads = false;
    }

    if constexpr (C::kRowSums) {
      if (adds) {
        if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();  // staging buffers are free
        __syncwarp();
        rows.reduce(staging - warp % 4 * C::kWarpBytes, C::kWarpBytes, group, row_totals);
      }
    }
    if constexpr (C::kStreams) {
      if (w.streamed && !join<C>(p, w, group, word + 4 * group, sum, adds, row_totals)) continue;
    }
    if constexpr (C::kRowSums) {
      if (adds) store_row_sums<C>(p, w, group, of_row, row_totals);
    }
    if constexpr (C::kSplitsK) {
      if ((p.flags & kSm90OverK) && !exchange<C>(p, warp, shared, word, sum)) {
        if (finishes) wait_for_bias(group);  // the warpgroup's other warps may finish their rows
        continue;
      }
    }
    if constexpr (C::kSwaps) {
      if (transposes) {
        store_transposed<C>(p, staging - warp % 4 * C::kWarpBytes, group, turn,
                            w.m0 + group * C::kBlocksM * 64, w, bias_of_rows, sum);
        continue;
      }
    }
    int m = w.m0 + group * C::kBlocksM * 64 + warp % 4 * 16;
    finish_tile<C>(p, finishes, staging, bias, group, turn, m, w, sum);
  }
  if (leads) named_arrive(kSkewBarrier, 2 * kWarpgroup);  // there was no tile
  if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();
}

template <class C>
TC_DEVICE void run(const Sm90MatmulParams& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  u32 shared = shared_address(memory);
  u32 full = shared + C::kBarriers, empty = full + 8 * C::kStages;
  // One word per warpgroup, for streamed tiles, or the barrier of a cluster that splits K.
  u32 word = empty + 8 * C::kStages;
  static_assert(sizeof(Work) == 64 && C::kRing > C::kStages);
  auto ring = reinterpret_cast<Work*>(memory + C::kBarriers + 16 * C::kStages + 16);
  int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  // Blocks that split K meet after their products alone, where they have one tile.
  const int meeting = is_lone<C>(p) ? 0 : kSm90OverK;
  bool together = p.flags & (3 << kSm90AlongN | 3 << kSm90AlongM | meeting);
  bool reads = C::kReads && (p.flags & (kSm90ReadA | kSm90ReadB));

  const auto initialize = [&] {
    if (shared % 1024 != 0) asm volatile("trap;");
    if (!(p.flags & kSm90ReadA)) prefetch_tensor_map(&p.a);
    if (!(p.flags & kSm90ReadB)) prefetch_tensor_map(&p.b);
    if (!C::kFromRegisters && !(p.flags & (kSm90General | kSm90OutUnaligned))) {
      prefetch_tensor_map(&p.out_map);
    }
    for (int s = 0; s < C::kStages; ++s) {
      barrier_init(full + 8 * s, reads ? kReadArrivals : C::kProducers);
      const int freeing = C::kRowSums && p.row_sums != nullptr ? 4 * C::kConsumers : C::kFreeing;
      barrier_init(empty + 8 * s, freeing * ClusterShape(p.flags).sources());
    }
    if constexpr (C::kSplitsK) {
      if (p.flags & kSm90OverK) expect_sums<C>(p, word);
    }
    fence_barrier_init();
  };
  // The first item of a producer, which it finds while another warp initializes the barriers.
  const bool finds = warp < C::kProducers && !reads && !is_lone<C>(p);
  Schedule<C> schedule(p);
  Work work;
  bool any = false;
  if (is_lone<C>(p) && !together) {
    start_alone<C::kProducers, C::kConsumers>(warp, initialize);
  } else {
    if (finds) {
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
    if constexpr (C::kConsumers > 1) fewer_registers<C::kProducerRegisters>();
    if (reads) {
      if constexpr (C::kReads) produce_by_reading<C>(p, shared, full, empty, ring);
    } else if (warp < C::kProducers && elect_one()) {
      if (is_lone<C>(p)) {
        if constexpr (kStartsEarly<C>) {
          produce_lone<C>(p, shared, full, empty, ring, warp == 0);
        }
      } else {
        produce<C>(p, shared, full, empty, ring, warp == 0, schedule, work, any);
      }
    } else {
      wait_for_previous_grid();
    }
    __syncwarp();
    if (C::kSplitsK && (p.flags & kSm90OverK)) {
      // Matches the cluster barrier of `exchange`. A cluster has at most one tile.
      if (static_cast<int>(blockIdx.x >> log_parts<C>(p)) < p.whole_tiles) cluster_meet();
    }
  } else {
    if constexpr (C::kConsumers > 1) more_registers<C::kConsumerRegisters>();
    wait_for_previous_grid();
    if constexpr (C::kFromRegisters) {
      consume_from_registers<C>(p, shared, full, empty, ring, warp - 4);
    } else {
      consume<C>(p, shared, full, empty, word, ring, warp - 4);
    }
  }
  // A block must not exit while another block of its cluster may still write to its shared memory.
  if (together) cluster_meet();
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, 1)
    TC_KERNEL(const __grid_constant__ Sm90MatmulParams p) {
  using Tile = Config<DType::TC_DTYPE, TC_A_MN, TC_B_MN, TC_TILE_M, TC_TILE_N, TC_STAGES,
                      TC_CONSUMERS, TC_STREAMS, TC_SPLITS_K, TC_READS>;
  using C = Swapping<Tile, TC_SWAPS>;
  static_assert(C::kThreads == TC_THREADS && C::kSharedBytes == TC_DYNAMIC_SHARED);
  static_assert(C::kTileK == TC_TILE_K, "128 bytes of K");
  run<C>(p);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "defaults": {
  "kind": "sm90", "layout": "{l.layout}", "tile": "{t.tile}", "block": ["{t.threads}", 1, 1],
  "stages": "{t.stages}", "dynamic_shared": "{t.shared}", "cost": {}, "streams": "{t.streams}",
  "splits_k": "{t.splits_k}", "reads": "{t.reads}", "swaps": "{t.swaps}",
  "defines": {"TC_DTYPE": "{d.dtype}", "TC_A_MN": "{l.a_mn}", "TC_B_MN": "{l.b_mn}",
              "TC_CONSUMERS": "{t.consumers}", "TC_STREAMS": "{t.streams}",
              "TC_SPLITS_K": "{t.splits_k}", "TC_READS": "{t.reads}", "TC_SWAPS": "{t.swaps}"}},
 "kernels": [
  {"name": "sm90_matmul_{d.short}_{l.layout}_{t.tile.0}x{t.tile.1}{t.name}",
   "for": {
    "d": "bf16 f16", "l": [{"layout": "nt", "a_mn": 0, "b_mn": 0}],
    "t": [
     ["name", "tile", "stages", "consumers", "threads", "shared", "streams", "splits_k", "reads",
      "swaps"],
     ["",      [128, 256, 64],  4, 2, 384, 230992, 0, 0, 0, 0],
     ["",      [128, 224, 64],  4, 2, 384, 230864, 0, 0, 0, 1],
     ["",      [128, 192, 64],  4, 2, 384, 230736, 0, 1, 0, 1],
     ["",      [128, 160, 64],  5, 2, 384, 218336, 0, 1, 0, 1],
     ["",      [128, 128, 64],  6, 2, 384, 230512, 0, 1, 0, 0],
     ["",      [128, 96, 64],   7, 2, 384, 218112, 0, 1, 0, 1],
     ["",      [128, 80, 64],   7, 2, 384, 220096, 0, 1, 0, 0],
     ["",      [192, 192, 64],  4, 3, 512, 222928, 0, 0, 0, 0],
     ["",      [192, 160, 64],  4, 3, 512, 230928, 0, 0, 0, 1],
     ["",      [64, 192, 64],   6, 1, 256, 230384, 0, 0, 0, 0],
     ["",      [128, 64, 64],   8, 2, 384, 230800, 0, 1, 0, 0],
     ["",      [64, 128, 64],   8, 1, 256, 230800, 0, 1, 0, 0],
     ["",      [64, 96, 64],    9, 1, 256, 218464, 0, 0, 0, 0],
     ["",      [64, 32, 64],   14, 1, 256, 206128, 0, 0, 0, 0],
     ["",      [64, 64, 64],   10, 1, 256, 197936, 0, 1, 0, 0],
     ["_read", [64, 64, 64],   10, 1, 256, 197936, 0, 0, 1, 0]]}},
  {"name": "sm90_matmul_{d.short}_{l.layout}_{t.tile.0}x{t.tile.1}{t.name}",
   "for": {
    "d": "bf16 f16", "l": [{"layout": "nn", "a_mn": 0, "b_mn": 1}],
    "t": [
     ["name", "tile", "stages", "consumers", "threads", "shared", "streams", "splits_k", "reads",
      "swaps"],
     ["",      [128, 256, 64],  4, 2, 384, 230992, 0, 0, 0, 0],
     ["",      [128, 192, 64],  5, 2, 384, 222560, 0, 1, 0, 0],
     ["",      [128, 160, 64],  5, 2, 384, 222432, 0, 1, 0, 0],
     ["",      [128, 128, 64],  6, 2, 384, 230512, 0, 1, 0, 0],
     ["",      [128, 96, 64],   6, 2, 384, 230384, 0, 1, 0, 0],
     ["",      [192, 192, 64],  4, 3, 512, 222928, 0, 0, 0, 0],
     ["",      [192, 160, 64],  4, 3, 512, 222736, 0, 0, 0, 0],
     ["",      [64, 192, 64],   6, 1, 256, 230384, 0, 0, 0, 0],
     ["",      [128, 64, 64],   8, 2, 384, 230800, 0, 1, 0, 0],
     ["",      [64, 128, 64],   8, 1, 256, 230800, 0, 1, 0, 0],
     ["",      [64, 64, 64],   10, 1, 256, 197936, 0, 1, 0, 0],
     ["_read", [64, 64, 64],   10, 1, 256, 197936, 0, 0, 1, 0]]}},
  {"name": "sm90_matmul_{d.short}_{l.layout}_{t.tile.0}x{t.tile.1}{t.name}",
   "for": {
    "d": "bf16 f16", "l": [{"layout": "tn", "a_mn": 1, "b_mn": 1}],
    "t": [
     ["name", "tile", "stages", "consumers", "threads", "shared", "streams", "splits_k", "reads",
      "swaps"],
     ["",      [128, 256, 64],  4, 2, 384, 230992, 1, 0, 0, 0],
     ["",      [128, 192, 64],  5, 2, 384, 222560, 1, 1, 0, 1],
     ["",      [128, 160, 64],  5, 2, 384, 222432, 1, 1, 0, 1],
     ["",      [128, 128, 64],  6, 2, 384, 230512, 1, 1, 0, 0],
     ["",      [192, 192, 64],  4, 3, 512, 222928, 1, 0, 0, 0],
     ["",      [192, 160, 64],  4, 3, 512, 222736, 1, 0, 0, 1],
     ["",      [64, 128, 64],   8, 1, 256, 230800, 0, 0, 0, 0],
     ["",      [64, 64, 64],   10, 1, 256, 197936, 0, 1, 0, 0],
     ["_read", [64, 64, 64],   10, 1, 256, 197936, 0, 0, 1, 0]]}},
  {"name": "sm90_matmul_{d.short}_{l.layout}_{t.tile.0}x{t.tile.1}",
   "for": {
    "d": "bf16 f16", "l": [{"layout": "tt", "a_mn": 1, "b_mn": 0}],
    "t": [
     ["tile", "stages", "consumers", "threads", "shared", "streams", "splits_k", "reads", "swaps"],
     [[128, 256, 64], 4, 2, 384, 230992, 0, 0, 0, 0],
     [[128, 192, 64], 5, 2, 384, 222560, 0, 0, 0, 1],
     [[128, 160, 64], 5, 2, 384, 218336, 0, 0, 0, 1],
     [[128, 128, 64], 6, 2, 384, 230512, 0, 1, 0, 0],
     [[64, 128, 64],  8, 1, 256, 230800, 0, 0, 0, 0]]}},
  {"name": "sm90_matmul_tf32_{l.layout}_{t.tile.0}x{t.tile.1}",
   "for": {
    "d": "tf32", "l": [{"layout": "nt", "a_mn": 0, "b_mn": 0}],
    "t": [
     ["tile", "stages", "consumers", "threads", "shared", "streams", "splits_k", "reads", "swaps"],
     [[128, 256, 32], 4, 2, 384, 232016, 0, 0, 0, 0],
     [[128, 128, 32], 6, 2, 384, 231024, 0, 1, 0, 0],
     [[64, 128, 32],  8, 1, 256, 231056, 0, 0, 0, 0]]}},
  {"name": "sm90_matmul_tf32_{l.layout}_{t.tile.0}x{t.tile.1}",
   "for": {
    "d": "tf32", "l": [{"layout": "tt", "a_mn": 1, "b_mn": 0}],
    "t": [
     ["tile", "stages", "consumers", "threads", "shared", "streams", "splits_k", "reads", "swaps"],
     [[128, 256, 32], 4, 2, 384, 232016, 0, 0, 0, 0],
     [[128, 128, 32], 6, 2, 384, 231024, 0, 1, 0, 0]]}}]}
*/
