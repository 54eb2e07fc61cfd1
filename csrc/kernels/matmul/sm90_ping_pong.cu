// Matrix product on Hopper whose epilogues are hidden: two consumer warpgroups compute a tile each,
// in turns. While one of them multiplies, the other one finishes and stores the tile before. In
// sm90.cu both share a tile, and the tensor cores idle from its last product to the next one's
// first: 4,400 cycles for each 128 x 192, of which the products take 13,800 where K is 1,152.
//
// Its parameter, shared memory and producer are those of sm90.cu, without a ring of work items:
// every warp knows the sequence of tiles. It does not stream tiles, split K or read unaligned rows.
#include "sm90_block.cuh"
#include "sm90_producer.cuh"
#include "sm90_round.cuh"
#include "sm90_transposed.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

// Named barriers (+ warpgroup): its turn to multiply.
constexpr int kTurnBarrier = kGroupBarrier + 2;

// A Config of two consumers, each of which computes whole tiles.
template <class Tile, bool kSwapsValue>
struct PingPong : Tile {
  static constexpr bool kSwaps = kSwapsValue;  // tiles can be stored transposed
  static constexpr int kBlocksM = Tile::kTileM / 64;
  static constexpr int kFreeing = 1;  // arrivals of a block at an empty barrier
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(Tile::kConsumers == 2 && !Tile::kStreams && !Tile::kSplitsK && !Tile::kReads);
  static_assert(kBlocksM * Tile::kTileN <= 384, "accumulators: 192 registers at most");
};

// The position in the ring of stages, and the parity of its barriers.
template <class C>
struct Stage {
  int index = 0;
  u32 phase = 0;

  TC_DEVICE void next() {
    if (++index == C::kStages) {
      index = 0;
      phase ^= 1;
    }
  }
  TC_DEVICE void skip(int stages) {
    const int at = index + stages;
    index = at % C::kStages;
    phase ^= at / C::kStages & 1;
  }
};

// The first thread loads A, the other one B; one alone does both. `w` is the first tile, if there
// is any.
template <class C>
TC_DEVICE void produce(const Sm90MatmulParams& p, u32 shared, u32 full, u32 empty, bool first,
                       Schedule<C>& schedule, Work& w, bool any) {
  const bool of_a = C::kProducers == 1 || first, of_b = C::kProducers == 1 || !first;
  const ClusterShape& cluster = schedule.shape;
  const Share share_a = share_of_a(cluster, schedule.rank);
  const Share share_b = share_of_b(cluster, schedule.rank);
  const bool batched = p.flags & kSm90Batched;
  bool backwards = false;
  Position at;
  for (; any; any = schedule.get(w)) {
    int k = backwards ? (p.k_blocks - 1) * C::kTileK : 0;
    const int step = backwards ? -C::kTileK : C::kTileK;
    if (p.flags & kSm90Serpentine) backwards = !backwards;
    load_tile<C>(p, shared, full, empty, of_a, of_b, share_a, share_b, batched, w, p.k_blocks, k,
                 step, at);
  }
  wait_for_previous_grid();  // of a block without work
}

template <class C>
TC_DEVICE void consume(const Sm90MatmulParams& p, u32 shared, u32 full, u32 empty, Work& w,
                       int warp) {
  const int group = warp / 4;
  // Frees a stage in this block and in those that share a tile with it: one lane of the warpgroup
  // per block, spread over its warps.
  const ClusterShape cluster(p.flags);
  const int source = threadIdx.x % 32 * 4 + warp % 4;
  const bool frees = source < cluster.sources();
  const u32 target = cluster_rank() ^ cluster.source(source);
  const u32 freed = map_to_rank(empty, target);
  const u32 staging = shared + C::kStaging + warp * C::kWarpBytes;
  const u32 bias = shared + C::kBias + group * (C::kTileN * C::kElement);
  const u64 a0 = wgmma_descriptor(shared, 8192, 1024);
  const u64 b0 = wgmma_descriptor(shared + C::kABytes, 8192, 1024);
  const int clusters = static_cast<int>(gridDim.x) >> cluster.log_size();
  const int first = static_cast<int>(blockIdx.x) >> cluster.log_size();
  int turn = 0;  // of the warp's staging buffers
  Stage<C> stage;
  if (group == 1) stage.skip(p.k_blocks);
  for (int next = first + group * clusters; next < p.whole_tiles; next += 2 * clusters) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      Schedule<C> schedule(p);
      schedule.next = next;
      schedule.get(w);
    }
    __syncwarp();
    if (p.flags & kSm90Finish) request_bias<C>(p, bias, group, w.n0);
    // The other warpgroup has seen all of its stages arrive. (More than one round of the ring ahead
    // a barrier's parity would say nothing.)
    if (next != first) named_sync(kTurnBarrier + group, 2 * kWarpgroup);
    float sum[C::kBlocksM][C::kTileN / 2];
    bool begun = false;
    int previous = 0;
#pragma unroll 1
    for (int left = p.k_blocks; left > 0;) {
      if (stage.index == 0 && left >= C::kStages) {
        multiply_round<C>(sum, a0, begun, full, stage.phase, frees, freed);
        previous = C::kStages - 1;
        stage.phase ^= 1;
        left -= C::kStages;
      } else {
        barrier_wait(full + 8 * stage.index, stage.phase);
        multiply<C>(sum, a0 + stage.index * (C::kStageBytes >> 4),
                    b0 + stage.index * (C::kStageBytes >> 4), begun);
        wgmma_wait<1>();
        free_stage(frees && begun, empty + 8 * previous, target);
        previous = stage.index;
        stage.next();
        --left;
      }
      begun = true;
    }
    if (next + clusters < p.whole_tiles) named_arrive(kTurnBarrier + 1 - group, 2 * kWarpgroup);
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) keep_in_place(sum[i]);
    free_stage(frees, empty + 8 * previous, target);
    order_columns<C>(sum, w.n0);
    stage.skip(p.k_blocks);

    const int m = w.m0 + warp % 4 * 16;
    if constexpr (C::kSwaps) {
      if (p.flags & kSm90Transposed) {
        float bias_of_rows[C::kBlocksM][2];
        load_bias_of_rows<C>(p, m, bias_of_rows);
        store_transposed<C>(p, staging - warp % 4 * C::kWarpBytes, group, turn, w.m0, w,
                            bias_of_rows, sum);
        continue;
      }
    }
    finish_tile<C>(p, p.flags & kSm90Finish, staging, bias, group, turn, m, w, sum);
  }
  if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();
}

template <class C>
TC_DEVICE void run(const Sm90MatmulParams& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const u32 full = shared + C::kBarriers, empty = full + 8 * C::kStages;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const bool together = p.flags & (3 << kSm90AlongN | 3 << kSm90AlongM);

  // The producers find their first tile while another warp initializes the barriers.
  Schedule<C> schedule(p);
  Work work;
  bool any = false;
  if (warp < C::kProducers) {
    any = schedule.get(work);
  } else if (warp == C::kProducers) {
    if (elect_one()) {
      if (shared % 1024 != 0) asm volatile("trap;");
      prefetch_tensor_map(&p.a);
      prefetch_tensor_map(&p.b);
      if (!(p.flags & (kSm90General | kSm90OutUnaligned))) prefetch_tensor_map(&p.out_map);
      for (int s = 0; s < C::kStages; ++s) {
        barrier_init(full + 8 * s, C::kProducers);
        barrier_init(empty + 8 * s, C::kFreeing * ClusterShape(p.flags).sources());
      }
      fence_barrier_init();
    }
    __syncwarp();
  }
  meet_at_start(together);

  // The next grid's blocks may start as soon as they fit; they wait for the end of this grid.
  launch_next_grid();
  if (warp < 4) {
    fewer_registers<C::kProducerRegisters>();
    if (warp < C::kProducers && elect_one()) {
      produce<C>(p, shared, full, empty, warp == 0, schedule, work, any);
    } else {
      wait_for_previous_grid();
    }
    __syncwarp();
  } else {
    more_registers<C::kConsumerRegisters>();
    wait_for_previous_grid();
    // In shared memory, since registers are few.
    auto items = reinterpret_cast<Work*>(memory + C::kBarriers + 16 * C::kStages + 16);
    consume<C>(p, shared, full, empty, items[warp - 4], warp - 4);
  }
  // A block must not exit while another block of its cluster may still write to its shared memory.
  if (together) cluster_meet();
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, 1)
    TC_KERNEL(const __grid_constant__ Sm90MatmulParams p) {
  using Tile =
      Config<DType::TC_DTYPE, TC_A_MN, TC_B_MN, TC_TILE_M, TC_TILE_N, TC_STAGES, 2, 0, 0, 0>;
  using C = PingPong<Tile, TC_SWAPS>;
  static_assert(C::kThreads == TC_THREADS && C::kSharedBytes == TC_DYNAMIC_SHARED);
  static_assert(C::kTileK == TC_TILE_K, "128 bytes of K");
  run<C>(p);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "defaults": {
  "name": "sm90_matmul_{d.short}_{l.layout}_{t.tile.0}x{t.tile.1}_ping_pong",
  "kind": "sm90_ping_pong", "layout": "{l.layout}", "tile": "{t.tile}", "block": [384, 1, 1],
  "stages": "{t.stages}", "dynamic_shared": "{t.shared}", "accepted_spill": {"sm_90a": "{t.spill}"},
  "cost": {}, "streams": 0, "splits_k": 0, "reads": 0, "swaps": "{t.swaps}",
  "defines": {"TC_DTYPE": "{d.dtype}", "TC_A_MN": "{l.a_mn}", "TC_B_MN": "{l.b_mn}",
              "TC_SWAPS": "{t.swaps}"}, "for": {"d": "bf16 f16"}},
 "kernels": [
  {"for": {
    "l": [{"layout": "nt", "a_mn": 0, "b_mn": 0}],
    "t": [
     ["tile", "stages", "shared", "swaps", "spill"],
     [[128, 192, 64], 4, 230736, 1, 160],
     [[128, 160, 64], 5, 218336, 1,   0],
     [[128, 128, 64], 5, 230496, 0,   0]]}},
  {"for": {
    "l": [{"layout": "nn", "a_mn": 0, "b_mn": 1}],
    "t": [
     ["tile", "stages", "shared", "swaps", "spill"],
     [[128, 192, 64], 4, 230736, 0, 160],
     [[128, 160, 64], 4, 230608, 0,   0],
     [[128, 128, 64], 5, 230496, 0,   0]]}},
  {"for": {
    "l": [{"layout": "tn", "a_mn": 1, "b_mn": 1}],
    "t": [
     ["tile", "stages", "shared", "swaps", "spill"],
     [[128, 192, 64], 4, 230736, 1, 160],
     [[128, 160, 64], 4, 230608, 1,   0],
     [[128, 128, 64], 5, 230496, 0,   0]]}},
  {"for": {
    "l": [{"layout": "tt", "a_mn": 1, "b_mn": 0}],
    "t": [
     ["tile", "stages", "shared", "swaps", "spill"],
     [[128, 192, 64], 4, 230736, 1, 160],
     [[128, 160, 64], 5, 218336, 1,   0]]}}]}
*/
