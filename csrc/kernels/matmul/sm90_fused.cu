// Products on Hopper with one A and several weights, or with several outputs: a persistent,
// warp-specialized kernel with TMA and wgmma. sm90_fused_params.h says what it computes.
//
// It is sm90.cu without the parts that these products do not need: no part of K is split, all
// operands and outputs have tensor maps. A gated tile's B is half of the gate's rows and half of
// the up's, so that a thread has both sums of an output in its registers.
//
//   shared memory: kStages x (A tile, B tile) | one staging buffer per warp | full, empty barriers
//     | the bias of a tile per warpgroup
//   full[s]: the producer's arrival and all bytes of the stage
//   empty[s]: one arrival per consumer warpgroup of every block that receives this block's loads
#include "common/wgmma.cuh"
#include "sm90_block.cuh"
#include "sm90_fused_params.h"
#include "sm90_gate.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

constexpr bool kGated = TC_GATED;
// A cluster's blocks share a tile of B, in two halves.
constexpr int kHalves = 2;

template <class C>
constexpr int kOutputs = kGated ? C::kTileN / 2 : C::kTileN;  // columns of a tile's outputs

// The tiles of a block, one after the other; producer and consumers walk through the same ones.
template <class C>
struct Walk {
  const Sm90FusedParams& p;
  int pair, rank, cluster, clusters, tile, tiles;
  bool backwards = false;
  int m0, n0, weight;  // of the current tile; n0 within the weight's outputs

  TC_DEVICE explicit Walk(const Sm90FusedParams& params)
      : p(params), pair(p.flags & kFusedPair ? 1 : 0) {
    rank = blockIdx.x & pair;
    cluster = blockIdx.x >> pair;
    clusters = gridDim.x >> pair;
    tiles = p.tiles_m * p.tiles_n;
    tile = cluster - clusters;
  }

  // Groups of `group` rows of tiles, column by column, with columns reversed in every other group.
  TC_DEVICE bool next() {
    backwards = p.flags & kFusedSerpentine && tile >= 0 && !backwards;
    tile += clusters;
    if (tile >= tiles) return false;
    const int group = tile / (p.group * p.tiles_n);
    const int inside = tile - group * p.group * p.tiles_n;
    const int height = min(p.group, p.tiles_m - group * p.group);
    int column = inside / height;
    const int row = group * p.group + inside - column * height;
    if (group & 1) column = p.tiles_n - 1 - column;
    weight = 0;
    if constexpr (!kGated) {
#pragma unroll
      for (int i = 1; i < kFusedWeights; ++i) weight += column >= p.first[i];
    }
    m0 = ((row << pair) + rank) * C::kTileM;
    n0 = (column - p.first[weight]) * kOutputs<C>;
    return true;
  }
};

template <class C>
TC_DEVICE void produce(const Sm90FusedParams& p, u32 shared, u32 full, u32 empty) {
  constexpr int kHalfBytes = C::kBBytes / kHalves;
  Walk<C> walk(p);
  int stage = 0;
  u32 phase = 0;
  wait_for_previous_grid();
  while (walk.next()) {
    int k = walk.backwards ? (p.k_blocks - 1) * C::kTileK : 0;
    const int step = walk.backwards ? -C::kTileK : C::kTileK;
#pragma unroll 1
    for (int i = 0; i < p.k_blocks; ++i, k += step) {
      barrier_wait_bounded(empty + 8 * stage, phase ^ 1);
      const u32 arrived = full + 8 * stage, to = shared + stage * C::kStageBytes;
      barrier_expect(arrived, C::kStageBytes);
      tma_load(to, &p.a, arrived, k, walk.m0);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        if (walk.pair && half != walk.rank) continue;
        const Sm90FusedMap* map = &p.b[kGated ? half : walk.weight];
        const int n = kGated ? walk.n0 : walk.n0 + half * (C::kTileN / kHalves);
        const u32 part = to + C::kABytes + half * kHalfBytes;
        if (walk.pair) {
          tma_multicast(part, map, arrived, 3, k, n);
        } else {
          tma_load(part, map, arrived, k, n);
        }
      }
      if (++stage == C::kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
}

// Starts copying the bias of a tile's columns to the warpgroup's own shared memory; zeros past N or
// without a bias.
template <class C>
TC_DEVICE void request_tile_bias(const Sm90FusedParams& p, const Walk<C>& w, u32 bias, int group) {
  named_sync(kGroupBarrier + group, kWarpgroup);  // all have read the previous tile's bias
  const int own = threadIdx.x % kWarpgroup * 2;   // two columns per thread
  if (own >= C::kTileN) return;
  const auto from = static_cast<const u16*>(p.bias[w.weight]);
  // N is a multiple of 8.
  const int bytes = from != nullptr && w.n0 + own < p.n[w.weight] ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(bias + own * 2),
               "l"(bytes == 0 ? from : from + w.n0 + own), "r"(bytes)
               : "memory");
}

// Rounds 64 columns of sums and has the TMA store them.
template <class C>
TC_DEVICE void store_columns(const Sm90FusedParams& p, u32 staging, int& turn, const float* x,
                             int output, int m, int n, int columns) {
  const u32 buffer = next_buffer<C>(staging, turn);
  stage_columns<C, 64>(buffer, 0, x);
  fence_async_proxy();
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  if (m < p.m && n < columns) tma_store(&p.out[output], buffer, n, m, kEvictFirst);
  tma_store_commit();
}

// One warp's 16 rows of a gated tile.
template <class C>
TC_DEVICE void store_gated(const Sm90FusedParams& p, const Walk<C>& w, u32 staging, int& turn,
                           int m, float (&sum)[C::kTileN / 2]) {
  if (p.flags & kFusedAux) {
#pragma unroll
    for (int panel = 0; panel < C::kTileN / 64; ++panel) {
      const int in_half = panel % (kOutputs<C> / 64);
      store_columns<C>(p, staging, turn, sum + panel * 32, 1 + panel / (kOutputs<C> / 64), m,
                       w.n0 + in_half * 64, p.n[0]);
    }
  }
  apply_gate<C::kTileN / 4, false>(sum, p.flags >> kFusedActivation & 7, p.curve);
#pragma unroll
  for (int panel = 0; panel < kOutputs<C> / 64; ++panel) {
    store_columns<C>(p, staging, turn, sum + panel * 32, 0, m, w.n0 + panel * 64, p.n[0]);
  }
}

// One warp's rows of a layer without an activation.
template <class C>
TC_DEVICE void store_layer(const Sm90FusedParams& p, const Walk<C>& w, u32 staging, u32 bias,
                           int& turn, int m, float (&sum)[C::kBlocksM][C::kTileN / 2]) {
  if (p.bias[w.weight] != nullptr) {
    u32 at = bias + threadIdx.x % 4 * 4;
#pragma unroll
    for (int j = 0; j < C::kTileN / 8; ++j) {
      float low, high;
      load_bias_pair<C>(at + j * 16, low, high);
#pragma unroll
      for (int i = 0; i < C::kBlocksM; ++i) {
        sum[i][4 * j] += low;
        sum[i][4 * j + 1] += high;
        sum[i][4 * j + 2] += low;
        sum[i][4 * j + 3] += high;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
    for (int panel = 0; panel < C::kTileN / 64; ++panel) {
      store_columns<C>(p, staging, turn, sum[i] + panel * 32, w.weight, m + 64 * i,
                       w.n0 + panel * 64, p.n[w.weight]);
    }
  }
}

// One warp's rows of a layer with an activation: a loop over 64 columns at a time.
template <class C>
TC_DEVICE void store_activated(const Sm90FusedParams& p, const Walk<C>& w, u32 staging, u32 bias,
                               int& turn, int m, const float (&sum)[C::kBlocksM][C::kTileN / 2]) {
  constexpr int kSteps = C::kTileN / 64;
  const int activation = p.flags >> kFusedActivation & 7;
#pragma unroll 1
  for (int step = 0; step < C::kBlocksM * kSteps; ++step) {
    const int block = C::kBlocksM == 1 ? 0 : step / kSteps;
    const int column = (step - block * kSteps) * 64, row = m + 64 * block;
    float x[32];
    load_bias<C, 64>(bias + column * 2, x);
    take_sums<C, 64, 0, C::kBlocksM * kSteps>(step, 1.0f, sum, x);
    const int columns = p.n[w.weight];
    if (p.flags & kFusedAux) {
      store_columns<C>(p, staging, turn, x, 1, row, w.n0 + column, columns);
    }
    activate_all(p.curve, activation, x);
    store_columns<C>(p, staging, turn, x, w.weight, row, w.n0 + column, columns);
  }
}

template <class C>
TC_DEVICE void consume(const Sm90FusedParams& p, u32 shared, u32 full, u32 empty, int warp) {
  int stage = 0, turn = 0;
  u32 phase = 0;
  const int group = warp / 4;
  Walk<C> walk(p);
  // Frees a stage in this block and in the one that shares B with it: one lane of the warpgroup
  // each.
  const int source = threadIdx.x % 32 * 4 + warp % 4;
  const bool frees = source <= walk.pair;
  const u32 target = cluster_rank() ^ static_cast<u32>(source);
  const bool activates =
      (p.flags >> kFusedActivation & 7) != kActivationNone || p.flags & kFusedAux;
  bool leads = C::kConsumers == 2 && group == 0;
  const u32 staging = shared + C::kStaging + warp * C::kWarpBytes;
  const u32 bias = shared + C::kBias + group * (C::kTileN * 2);
  const u64 a0 = wgmma_descriptor(shared + group * C::kBlocksM * 8192, 8192, 1024);
  const u64 b0 = wgmma_descriptor(shared + C::kABytes, 8192, 1024);

  if (C::kConsumers == 2 && group == 1) named_sync(kSkewBarrier, 2 * kWarpgroup);
  while (walk.next()) {
    if constexpr (!kGated) request_tile_bias<C>(p, walk, bias, group);
    float sum[C::kBlocksM][C::kTileN / 2];
    int previous = stage;
    auto step = [&](int add) {
      barrier_wait(full + 8 * stage, phase);
      multiply<C>(sum, a0 + stage * (C::kStageBytes >> 4), b0 + stage * (C::kStageBytes >> 4), add);
      if (add) {
        wgmma_wait<1>();
        if (frees) barrier_arrive_remote(map_to_rank(empty + 8 * previous, target));
        if (leads) {
          named_arrive(kSkewBarrier, 2 * kWarpgroup);
          leads = false;
        }
      }
      previous = stage;
      if (++stage == C::kStages) {
        stage = 0;
        phase ^= 1;
      }
    };
    step(0);
#pragma unroll 1
    for (int i = 1; i < p.k_blocks; ++i) step(1);
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) keep_in_place(sum[i]);
    if (frees) barrier_arrive_remote(map_to_rank(empty + 8 * previous, target));
    if (leads) {
      named_arrive(kSkewBarrier, 2 * kWarpgroup);
      leads = false;
    }
    const int m = walk.m0 + group * C::kBlocksM * 64 + warp % 4 * 16;
    if constexpr (kGated) {
#pragma unroll
      for (int i = 0; i < C::kBlocksM; ++i) {
        store_gated<C>(p, walk, staging, turn, m + 64 * i, sum[i]);
      }
    } else {
      wait_for_bias(group);
      if (activates) {
        store_activated<C>(p, walk, staging, bias, turn, m, sum);
      } else {
        store_layer<C>(p, walk, staging, bias, turn, m, sum);
      }
    }
  }
  if (leads) named_arrive(kSkewBarrier, 2 * kWarpgroup);  // there was no tile
  if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();
}

template <class C>
TC_DEVICE void run(const Sm90FusedParams& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const u32 full = shared + C::kBarriers, empty = full + 8 * C::kStages;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const bool pair = p.flags & kFusedPair;

  if (threadIdx.x == 0) {
    if (shared % 1024 != 0) asm volatile("trap;");
    prefetch_tensor_map(&p.a);
    prefetch_tensor_map(&p.b[0]);
    prefetch_tensor_map(&p.out[0]);
    for (int s = 0; s < C::kStages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, C::kConsumers * (pair ? 2 : 1));
    }
    fence_barrier_init();
  }
  meet_at_start(pair);

  // The next grid's blocks may start as soon as they fit; they wait for the end of this grid.
  launch_next_grid();
  if (warp < 4) {
    if constexpr (C::kConsumers > 1) fewer_registers<C::kProducerRegisters>();
    if (threadIdx.x == 0) {
      produce<C>(p, shared, full, empty);
    } else {
      wait_for_previous_grid();
    }
    __syncwarp();
  } else {
    if constexpr (C::kConsumers > 1) more_registers<C::kConsumerRegisters>();
    wait_for_previous_grid();
    consume<C>(p, shared, full, empty, warp - 4);
  }
  // A block must not exit while the other one of its cluster may still write to its shared memory.
  if (pair) cluster_meet();
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, 1)
    TC_KERNEL(const __grid_constant__ Sm90FusedParams p) {
  using C = Config<DType::TC_DTYPE, false, false, TC_TILE_M, TC_TILE_N, TC_STAGES, TC_CONSUMERS,
                   false, false, false>;
  static_assert(C::kThreads == TC_THREADS && C::kSharedBytes == TC_DYNAMIC_SHARED);
  static_assert(C::kTileK == TC_TILE_K && C::kPanel == 64, "128 bytes of K and of a panel");
  run<C>(p);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sm90_fused_matmul_{d.short}_{f.name}_{t.tile.0}x{t.tile.1}", "family": "fused",
   "kind": "sm90_fused", "layout": "nt", "tile": "{t.tile}", "block": [384, 1, 1],
   "stages": "{t.stages}", "dynamic_shared": "{t.shared}", "cost": {}, "gated": "{f.gated}",
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_CONSUMERS": 2, "TC_GATED": "{f.gated}"},
   "for": {
    "d": "bf16 f16", "f": [{"name": "gated", "gated": 1}, {"name": "layers", "gated": 0}],
    "t": [
     ["tile", "stages", "shared"],
     [[128, 256, 64], 4, 230992],
     [[128, 128, 64], 6, 230512]]}}]}
*/
