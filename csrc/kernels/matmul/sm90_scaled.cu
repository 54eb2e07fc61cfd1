// Products of 8-bit floats with scales on Hopper: a persistent, warp-specialized kernel with TMA
// and wgmma. sm90_scaled_params.h says what it computes.
//
//   shared memory: kStages x (A tile, B tile) | one staging buffer per warp | kStages x (scales of
//     A's rows, of B's columns) | full, empty barriers
//   full[s]: the producer's arrival and all bytes of the stage; with scales of blocks also the
//     copies of 32 lanes
//   empty[s]: one arrival per consumer warpgroup (warp, where warps read scales) of every block
//     that receives this block's loads
//
// K runs forwards and each output is a sum of its own in every tile, so that a row's bits do not
// depend on the other rows.
#include "sm90_epilogue.cuh"
#include "sm90_scaled_params.h"
#include "sm90_scaled_step.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

// A cluster's blocks share a tile of B, in two halves.
constexpr int kHalves = 2;
constexpr int kBlockK = 128;

struct Config {
  static constexpr Float8 kA = Float8::TC_A, kB = Float8::TC_B;
  static constexpr int kTileM = TC_TILE_M, kTileN = TC_TILE_N, kStages = TC_STAGES;
  static constexpr int kConsumers = TC_THREADS / kWarpgroup - 1;
  // Whether each 128 of K is added in float32, and whether these have scales of single columns.
  static constexpr bool kPromoted = TC_PROMOTED, kColumns = TC_COLUMNS;
  static constexpr int kBlocksM = kTileM / (64 * kConsumers);  // m64 blocks per warpgroup
  static constexpr int kABytes = kTileM * kBlockK, kBBytes = kTileN * kBlockK;
  static constexpr int kStageBytes = kABytes + kBBytes;
  static constexpr int kFreeing = kPromoted ? 4 * kConsumers : kConsumers;
  static constexpr int kScaleColumns = kColumns ? kTileN : 1;
  static constexpr int kScaleBytes = !kPromoted ? 0 : kTileM * 4 + (kColumns ? kTileN * 4 : 16);
  static constexpr int kControlBytes = kStages * (16 + kScaleBytes);
  static constexpr int kLeft =
      (kMaxShared - kControlBytes - kStages * kStageBytes) / (4 * kConsumers) / 2048;
  static constexpr int kBuffers = kLeft > 4 ? 4 : kLeft;  // of 16 rows of 128 bytes
  static constexpr int kWarpBytes = 2048 * kBuffers;
  static constexpr int kStaging = kStages * kStageBytes;
  static constexpr int kScales = kStaging + 4 * kConsumers * kWarpBytes;
  static constexpr int kBarriers = kScales + kStages * kScaleBytes;
  static constexpr int kSharedBytes = kBarriers + 16 * kStages;
  static_assert(kTileM == 64 * kConsumers * kBlocksM && kTileN % 32 == 0);
  static_assert(kSharedBytes <= kMaxShared && kLeft >= 1, "shared memory of a block");
  static_assert(!kPromoted || kTileN <= kBlockK, "a tile has one column of B's blocks");
  static_assert(!kColumns || kPromoted);
};

// A Config that stores outputs of a type, for sm90_epilogue.cuh.
template <class C, DType kTypeValue>
struct Output : C {
  static constexpr DType kType = kTypeValue;
  static constexpr int kElement = kType == DType::float32 ? 4 : 2;
  static constexpr int kPanel = C::kTileN * kElement < 128 ? C::kTileN : 128 / kElement;
};

// The tiles of a block, one after the other; producers and consumers walk through the same ones.
template <class C>
struct Walk {
  const Sm90ScaledParams& p;
  int pair, rank, clusters, tile;
  int m0, n0;

  TC_DEVICE explicit Walk(const Sm90ScaledParams& params)
      : p(params), pair(p.flags & kScaledPair ? 1 : 0) {
    rank = blockIdx.x & pair;
    clusters = gridDim.x >> pair;
    tile = static_cast<int>(blockIdx.x >> pair) - clusters;
  }

  // Groups of `group` rows of tiles, column by column, with columns reversed in every other group.
  TC_DEVICE bool next() {
    tile += clusters;
    if (tile >= p.tiles_m * p.tiles_n) return false;
    const int group = tile / (p.group * p.tiles_n);
    const int inside = tile - group * p.group * p.tiles_n;
    const int height = min(p.group, p.tiles_m - group * p.group);
    int column = inside / height;
    const int row = group * p.group + inside - column * height;
    if (group & 1) column = p.tiles_n - 1 - column;
    m0 = ((row << pair) + rank) * C::kTileM;
    n0 = column * C::kTileN;
    return true;
  }
};

// A place in the ring of stages.
template <class C>
struct Stage {
  int number = 0;
  u32 phase = 0;

  TC_DEVICE void advance() {
    if (++number == C::kStages) {
      number = 0;
      phase ^= 1;
    }
  }
};

// ---- producers ----------------------------------------------------------------------------------

template <class C>
TC_DEVICE void load_tiles(const Sm90ScaledParams& p, u32 shared, u32 full, u32 empty) {
  constexpr int kHalfRows = C::kTileN / kHalves;
  Walk<C> walk(p);
  Stage<C> stage;
  while (walk.next()) {
#pragma unroll 1
    for (int i = 0; i < p.k_blocks; ++i, stage.advance()) {
      const int k = i * kBlockK;
      barrier_wait_bounded(empty + 8 * stage.number, stage.phase ^ 1);
      const u32 arrived = full + 8 * stage.number, to = shared + stage.number * C::kStageBytes;
      barrier_expect(arrived, C::kStageBytes);
      tma_load(to, &p.a, arrived, k, walk.m0);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        if (walk.pair && half != walk.rank) continue;
        const u32 part = to + C::kABytes + half * kHalfRows * kBlockK;
        if (walk.pair) {
          tma_multicast(part, &p.b, arrived, 3, k, walk.n0 + half * kHalfRows);
        } else {
          tma_load(part, &p.b, arrived, k, walk.n0 + half * kHalfRows);
        }
      }
    }
  }
}

// Arrives at the barrier when the thread's copies so far have arrived.
TC_DEVICE void arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Executed by one warp: scales of blocks of K.
template <class C>
TC_DEVICE void load_scales(const Sm90ScaledParams& p, u32 shared, u32 full, u32 empty) {
  Walk<C> walk(p);
  Stage<C> stage;
  const int lane = threadIdx.x % 32;
  auto copy = [](u32 to, const float* from, int at, int size, int shift, tc_int64 stride) {
    const bool exists = at < size;
    cp_async<4>(to, exists ? from + (at >> shift) * stride : from, exists);
  };
  while (walk.next()) {
#pragma unroll 1
    for (int i = 0; i < p.k_blocks; ++i, stage.advance()) {
      barrier_wait_bounded(empty + 8 * stage.number, stage.phase ^ 1);
      const u32 to = shared + C::kScales + stage.number * C::kScaleBytes;
#pragma unroll
      for (int row = 0; row < C::kTileM; row += 32) {
        copy(to + (row + lane) * 4, p.scale_a + i * p.a_stride_k, walk.m0 + row + lane, p.m,
             p.a_shift, p.a_stride);
      }
#pragma unroll
      for (int column = 0; column < C::kScaleColumns; column += 32) {
        if (C::kScaleColumns < 32 && lane >= C::kScaleColumns) continue;
        copy(to + (C::kTileM + column + lane) * 4, p.scale_b + i * p.b_stride_k,
             walk.n0 + column + lane, p.n, p.b_shift, p.b_stride);
      }
      arrive_after_copies(full + 8 * stage.number);
    }
  }
}

// ---- consumers ----------------------------------------------------------------------------------

// Scales and bias of a tile's columns: a lane holds every 32nd column, from its own number on.
// Loaded before the products, so that their latency is hidden.
template <int kTileN>
struct Columns {
  static constexpr int kOwn = kTileN / 32;
  float scale[kOwn], bias[kOwn];

  TC_DEVICE void load(const Sm90ScaledParams& p, int n0) {
    const bool blocks = p.flags & kScaledBlocks;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int n = n0 + 32 * i + threadIdx.x % 32;
      const bool exists = n < p.n;
      scale[i] = blocks || !exists ? 1.0f : p.scale_b[n * p.b_stride];
      bias[i] = exists && p.bias != nullptr ? load_bias_of(p, n * p.bias_stride) : 0.0f;
    }
  }

  static TC_DEVICE float load_bias_of(const Sm90ScaledParams& p, tc_int64 at) {
    if (p.bias_type == kScaledFloat32) return load_element<DType::float32>(p.bias, at);
    if (p.bias_type == kScaledFloat16) return load_element<DType::float16>(p.bias, at);
    return load_element<DType::bfloat16>(p.bias, at);
  }
};

TC_DEVICE float shuffled(float value, int lane) { return __shfl_sync(~0u, value, lane); }

// Stores the unaligned rows of floats that a warp holds in the accumulators' layout.
template <int kColumns>
TC_DEVICE void store_floats(const float (&x)[kColumns / 2], float* out, tc_int64 stride, int rows,
                            int columns) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (row < rows && column < columns) out[row * stride + column] = x[i];
  }
}

// Scales, rounds and stores one warp's 16 rows from row m on.
template <class O>
TC_DEVICE void store_rows(const Sm90ScaledParams& p, int n0, u32 staging, int& turn, int m,
                          const float (&rows)[2], const Columns<O::kTileN>& columns,
                          const float (&sum)[O::kTileN / 2]) {
  const int lane = threadIdx.x % 32;
  const bool unaligned = p.flags & kScaledOutUnaligned;
#pragma unroll
  for (int panel = 0; panel < O::kTileN / O::kPanel; ++panel) {
    float x[O::kPanel / 2];
#pragma unroll
    for (int j = 0; j < O::kPanel / 8; ++j) {
      const int column = panel * O::kPanel + 8 * j;  // of the tile
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int source = column % 32 + lane % 4 * 2 + i % 2;
        const float scale = shuffled(columns.scale[column / 32], source);
        const float bias = shuffled(columns.bias[column / 32], source);
        x[4 * j + i] = __fmaf_rn(sum[column / 2 + i] * rows[i / 2], scale, bias);
      }
    }
    const int n = n0 + panel * O::kPanel;
    if (O::kElement == 4 && unaligned) {
      store_floats<O::kPanel>(x, static_cast<float*>(p.out) + m * p.out_stride + n, p.out_stride,
                              p.m - m, p.n - n);
      continue;
    }
    const u32 buffer = next_buffer<O>(staging, turn);
    stage_columns<O, O::kPanel>(buffer, 0, x);
    if constexpr (O::kElement == 2) {
      if (unaligned) {
        __syncwarp();
        if (m < p.m && n < p.n) {
          store_panel_unaligned<O>(buffer, static_cast<u16*>(p.out) + m * p.out_stride + n,
                                   p.out_stride, min(16, p.m - m), min(O::kPanel, p.n - n));
        }
        continue;
      }
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      if (m < p.m && n < p.n) tma_store(&p.out_map, buffer, n, m, kEvictFirst);
      tma_store_commit();
    }
  }
}

template <class C>
TC_DEVICE void consume(const Sm90ScaledParams& p, u32 shared, u32 full, u32 empty, int warp) {
  Stage<C> stage;
  int turn = 0;
  const int group = warp / 4, lane = threadIdx.x % 32;
  Walk<C> walk(p);
  // Frees a stage in this block and in the one that shares B with it. Where scales are read, each
  // warp does, since nothing else keeps the warps together; else one of the warpgroup, whose warps
  // wgmma keeps together.
  const int source = C::kPromoted ? lane : lane * 4 + warp % 4;
  const bool frees = source <= walk.pair;
  const u32 target = cluster_rank() ^ static_cast<u32>(source);
  bool leads = C::kConsumers == 2 && group == 0;
  const u32 staging = shared + C::kStaging + warp * C::kWarpBytes;
  const int first_row = group * C::kBlocksM * 64;  // of the tile
  const u64 a0 = wgmma_descriptor(shared + first_row * kBlockK, 8192, 1024);
  const u64 b0 = wgmma_descriptor(shared + C::kABytes, 8192, 1024);
  auto release = [&](int number) {
    if (C::kPromoted) __syncwarp();
    if (frees) barrier_arrive_remote(map_to_rank(empty + 8 * number, target));
    if (leads) named_arrive(kSkewBarrier, 2 * kWarpgroup);
    leads = false;
  };

  if (C::kConsumers == 2 && group == 1) named_sync(kSkewBarrier, 2 * kWarpgroup);
  while (walk.next()) {
    Columns<C::kTileN> columns;
    columns.load(p, walk.n0);
    const int m = walk.m0 + first_row + warp % 4 * 16;
    float rows[C::kBlocksM][2];
    const bool blocks = p.flags & kScaledBlocks;
#pragma unroll
    for (int i = 0; i < 2 * C::kBlocksM; ++i) {
      const int own = m + i / 2 * 64 + i % 2 * 8 + lane / 4;
      rows[i / 2][i % 2] = blocks || own >= p.m ? 1.0f : p.scale_a[own * p.a_stride];
    }

    float sum[C::kBlocksM][C::kTileN / 2];
    if constexpr (C::kPromoted) {
#pragma unroll
      for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
        for (int j = 0; j < C::kTileN / 2; ++j) sum[i][j] = 0.0f;
      }
#pragma unroll 1
      for (int k = 0; k < p.k_blocks; ++k) {
        barrier_wait(full + 8 * stage.number, stage.phase);
        const u32 own = shared + C::kScales + stage.number * C::kScaleBytes;
        StageScales scales[C::kBlocksM];
        float column = 1.0f;
        if (blocks && !C::kColumns) column = load_scale(own + C::kTileM * 4);
#pragma unroll
        for (int i = 0; i < 2 * C::kBlocksM; ++i) {
          float row = 1.0f;
          const int at = first_row + warp % 4 * 16 + i / 2 * 64 + i % 2 * 8 + lane / 4;
          if (blocks) row = load_scale(own + at * 4);
          scales[i / 2].rows[i % 2] = row * column;
        }
        const u32 offset = stage.number * (C::kStageBytes >> 4);
#pragma unroll
        for (int i = 0; i < C::kBlocksM; ++i) {
          float part[C::kTileN / 2];
          wgmma_fence();
          multiply_stage<C::kTileN, C::kA, C::kB>(part, a0 + offset + i * (8192 >> 4), b0 + offset,
                                                  0);
          wgmma_commit();
          wgmma_wait<0>();
          keep_in_place(part);
          const bool last = i == C::kBlocksM - 1;
          if (last && !C::kColumns) release(stage.number);
          if constexpr (C::kColumns) {
            promote_columns<C::kTileN>(sum[i], part, scales[i], own + C::kTileM * 4);
          } else {
            promote<C::kTileN>(sum[i], part, scales[i]);
          }
          if (last && C::kColumns) release(stage.number);
        }
        stage.advance();
      }
    } else {
      int previous = 0;
#pragma unroll 1
      for (int k = 0; k < p.k_blocks; ++k) {
        barrier_wait(full + 8 * stage.number, stage.phase);
        const u32 offset = stage.number * (C::kStageBytes >> 4);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::kBlocksM; ++i) {
          multiply_stage<C::kTileN, C::kA, C::kB>(sum[i], a0 + offset + i * (8192 >> 4),
                                                  b0 + offset, k > 0);
        }
        wgmma_commit();
        if (k > 0) {
          wgmma_wait<1>();
          release(previous);
        }
        previous = stage.number;
        stage.advance();
      }
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < C::kBlocksM; ++i) keep_in_place(sum[i]);
      release(previous);
    }
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
      auto store = [&](auto output) {
        using O = decltype(output);
        store_rows<O>(p, walk.n0, staging, turn, m + 64 * i, rows[i], columns, sum[i]);
      };
      if (p.out_type == kScaledBFloat16) {
        store(Output<C, DType::bfloat16>{});
      } else if (p.out_type == kScaledFloat16) {
        store(Output<C, DType::float16>{});
      } else {
        store(Output<C, DType::float32>{});
      }
    }
  }
  if (leads) named_arrive(kSkewBarrier, 2 * kWarpgroup);  // there was no tile
  if (lane == 0) tma_store_wait_read<0>();
}

template <class C>
TC_DEVICE void run(const Sm90ScaledParams& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const u32 full = shared + C::kBarriers, empty = full + 8 * C::kStages;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const bool pair = p.flags & kScaledPair, blocks = p.flags & kScaledBlocks;

  if (threadIdx.x == 0) {
    if (shared % 1024 != 0) asm volatile("trap;");
    prefetch_tensor_map(&p.a);
    prefetch_tensor_map(&p.b);
    if (!(p.flags & kScaledOutUnaligned)) prefetch_tensor_map(&p.out_map);
    for (int s = 0; s < C::kStages; ++s) {
      barrier_init(full + 8 * s, C::kPromoted && blocks ? 33 : 1);
      barrier_init(empty + 8 * s, C::kFreeing * (pair ? 2 : 1));
    }
    fence_barrier_init();
  }
  if (pair) {
    __syncwarp();
    cluster_meet();
  } else {
    __syncthreads();
  }

  // The next grid's blocks may start as soon as they fit; they wait for the end of this grid.
  launch_next_grid();
  if (warp < 4) {
    if constexpr (C::kConsumers > 1) fewer_registers<40>();
    wait_for_previous_grid();
    if (threadIdx.x == 0) load_tiles<C>(p, shared, full, empty);
    if (C::kPromoted && blocks && warp == 1) load_scales<C>(p, shared, full, empty);
    __syncwarp();
  } else {
    if constexpr (C::kConsumers > 1) more_registers<232>();
    wait_for_previous_grid();
    consume<C>(p, shared, full, empty, warp - 4);
  }
  // A block must not exit while the other one of its cluster may still write to its shared memory.
  if (pair) cluster_meet();
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, 1)
    TC_KERNEL(const __grid_constant__ Sm90ScaledParams p) {
  static_assert(Config::kSharedBytes == TC_DYNAMIC_SHARED && TC_TILE_K == kBlockK);
  run<Config>(p);
}

}  // namespace torch_cubin::TC_KERNEL

// Costs in nanoseconds on an H200 (2026-11-27), when all multiprocessors compute: each 128 of K of
// a tile, and the rest of a tile.
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "defaults": {
  "family": "scaled", "kind": "sm90_scaled", "archs": ["sm_90a"], "alignment": 16, "cost": "{t.cost}",
  "dtype": "float8_e4m3fn", "layout": "nt", "a": "{d.a}", "b": "{d.b}",
  "tile": "{t.tile}", "stages": "{t.stages}", "block": ["{t.threads}", 1, 1],
  "dynamic_shared": "{t.shared}",
  "defines": {"TC_A": "{d.a}", "TC_B": "{d.b}", "TC_PROMOTED": "{t.promoted}",
              "TC_COLUMNS": "{t.columns}"},
  "math": "{t.math}"},
 "kernels": [
  {"name": "sm90_scaled_matmul_e4m3_{t.math}_{t.name}",
   "for": {
    "d": [{"a": "e4m3", "b": "e4m3"}],
    "t": [
     {"math": "fast", "promoted": 0, "columns": 0, "name": "128x256", "tile": [128, 256, 128],
      "cost": {"k_tile": 820, "fixed": 1500}, "stages": 4, "threads": 384, "shared": 229440},
     {"math": "fast", "promoted": 0, "columns": 0, "name": "128x128", "tile": [128, 128, 128],
      "cost": {"k_tile": 410, "fixed": 900}, "stages": 6, "threads": 384, "shared": 229472},
     {"math": "fast", "promoted": 0, "columns": 0, "name": "128x64", "tile": [128, 64, 128],
      "cost": {"k_tile": 260, "fixed": 800}, "stages": 8, "threads": 384, "shared": 229504},
     {"math": "fast", "promoted": 0, "columns": 0, "name": "64x128", "tile": [64, 128, 128],
      "cost": {"k_tile": 260, "fixed": 700}, "stages": 8, "threads": 256, "shared": 229504},
     {"math": "fast", "promoted": 0, "columns": 0, "name": "64x64", "tile": [64, 64, 128],
      "cost": {"k_tile": 165, "fixed": 600}, "stages": 12, "threads": 256, "shared": 229568},
     {"math": "fast", "promoted": 0, "columns": 0, "name": "64x32", "tile": [64, 32, 128],
      "cost": {"k_tile": 153, "fixed": 600}, "stages": 16, "threads": 256, "shared": 229632},
     {"math": "promoted", "promoted": 1, "columns": 0, "name": "256x128", "tile": [256, 128, 128],
      "cost": {"k_tile": 1120, "fixed": 1500}, "stages": 4, "threads": 384, "shared": 217216},
     {"math": "promoted", "promoted": 1, "columns": 0, "name": "128x128", "tile": [128, 128, 128],
      "cost": {"k_tile": 620, "fixed": 900}, "stages": 6, "threads": 384, "shared": 216256},
     {"math": "promoted", "promoted": 1, "columns": 0, "name": "128x64", "tile": [128, 64, 128],
      "cost": {"k_tile": 420, "fixed": 800}, "stages": 8, "threads": 384, "shared": 217344},
     {"math": "promoted", "promoted": 1, "columns": 0, "name": "64x64", "tile": [64, 64, 128],
      "cost": {"k_tile": 270, "fixed": 600}, "stages": 12, "threads": 256, "shared": 224640},
     {"math": "promoted", "promoted": 1, "columns": 0, "name": "64x32", "tile": [64, 32, 128],
      "cost": {"k_tile": 230, "fixed": 600}, "stages": 16, "threads": 256, "shared": 225792},
     {"math": "columns", "promoted": 1, "columns": 1, "name": "128x128", "tile": [128, 128, 128],
      "cost": {"k_tile": 800, "fixed": 900}, "stages": 6, "threads": 384, "shared": 219232}]}},
  {"name": "sm90_scaled_matmul_{d.a}_{d.b}_{t.math}_{t.name}",
   "for": {
    "d": [{"a": "e4m3", "b": "e5m2"}, {"a": "e5m2", "b": "e4m3"}],
    "t": [
     {"math": "promoted", "promoted": 1, "columns": 0, "name": "128x128", "tile": [128, 128, 128],
      "cost": {"k_tile": 620, "fixed": 900}, "stages": 6, "threads": 384, "shared": 216256}]}}]}
*/
