// Products of groups on Hopper, whose sizes only the device knows: a persistent, warp-specialized
// kernel with TMA and wgmma. sm90_grouped_params.h says what it computes.
//
// The loop is that of sm90_fused.cu. A tile begins at its group's first row, so its last rows
// may be the next group's: warps with 16 rows of the group have the TMA store them, others store
// their rows themselves. Where groups divide K, a group's last k block has rows of the next group,
// which the consumers overwrite with zeros in shared memory.
//
//   shared memory: kStages x (A tile, B tile) | one staging buffer per warp | full, empty barriers
//     | a ring of work items
//   full[s]: the producer's arrival and all bytes of the stage; gathered rows: the arrival of every
//     producer thread, too
//   empty[s]: one arrival per consumer warpgroup of every block that receives this block's loads
//
// K runs forwards in every tile, so that a row's bits do not depend on the other groups.
//
// It is over 500 lines because its producer gathers rows and its epilogue scatters them.
#include "common/wgmma.cuh"
#include "groups_schedule.cuh"
#include "sm90_block.cuh"
#include "sm90_gate.cuh"
#include "sm90_grouped_params.h"
#include "sm90_interleaved.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

// Groups divide K where A is contiguous along M, else M.
template <class C>
constexpr bool kContraction = C::kAMnMajor;
// Whether tiles may have half the height: of two warpgroups one then multiplies nothing (H200, 16
// uneven groups, N 7168, K 2048: 0.98 of the time). NOTE: not where a group ends, too, whose last
// tile would then take half of the time: blocks that part read less at the same time, and at the
// power limit N 4096, K 7168 took 1.04 of the time. Nor in 128x128 of NN: 0.98 of the time in turns
// of 12 ms, 1.03 in turns of 50.
template <class C>
constexpr bool kHalfTiles = C::kTileN == 256 && C::kTileM == 128 && !C::kAMnMajor && !C::kBMnMajor;
template <class C>
using Schedule = GroupedSchedule<Sm90GroupedParams, kContraction<C>, C::kTileM, kHalfTiles<C>>;

// Whether the kernel has the options of rows.
constexpr bool kExperts = TC_EXPERTS;

constexpr int kHalves = 2;         // of a tile of B, of which each block of a cluster loads one
constexpr int kPanelBytes = 8192;  // 64 rows of 128 bytes

// The first column of B of a tile's half.
TC_DEVICE int column_of_b(const Sm90GroupedParams& p, int n0, int half) {
  const bool interleaved = kExperts && (p.flags & kGroupedInterleaved);
  return (interleaved ? 2 * n0 : n0) + half * p.half_columns;
}

// ---- producer -----------------------------------------------------------------------------------

template <class C>
TC_DEVICE void load_b(const Sm90GroupedParams& p, u32 to, u32 arrived, int k, int n0, int group,
                      bool pair) {
  if constexpr (kContraction<C>) group = 0;
  auto load = [&](u32 part, int x, int y) {
    if (pair) {
      tma_multicast(part, &p.b, arrived, 3, x, y, group, 0, 0);
    } else {
      tma_load(part, &p.b, arrived, x, y, group, 0, 0);
    }
  };
  const int rank = cluster_rank() & 1;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    if (pair && half != rank) continue;
    const u32 part = to + half * (C::kBBytes / kHalves);
    const int column = column_of_b(p, n0, half);
    if constexpr (C::kBMnMajor) {
#pragma unroll
      for (int panel = 0; panel < C::kTileN / kHalves / 64; ++panel) {
        load(part + panel * kPanelBytes, column + panel * 64, k);
      }
    } else {
      load(part, k, column);
    }
  }
}

template <class C>
TC_DEVICE void load_stage(const Sm90GroupedParams& p, u32 to, u32 arrived, const GroupedWork& w,
                          int k, bool pair) {
  barrier_expect(arrived, p.stage_bytes);
  if constexpr (C::kAMnMajor) {
#pragma unroll
    for (int panel = 0; panel < C::kTileM / 64; ++panel) {
      tma_load(to + panel * kPanelBytes, &p.a, arrived, w.m0 + panel * 64, k);
    }
  } else {
    tma_load(to, &p.a, arrived, k, w.m0);
  }
  load_b<C>(p, to + C::kABytes, arrived, k, w.n0, w.group, pair);
}

// Executed by one warp, whose first lane loads.
template <class C>
TC_DEVICE void produce(const Sm90GroupedParams& p, u32 shared, u32 full, u32 empty,
                       GroupedWork* ring) {
  Schedule<C> schedule(p);
  const bool pair = p.flags & kGroupedPair, loads = threadIdx.x == 0;
  int stage = 0, number = 0;
  u32 phase = 0;
  GroupedWork w;
  wait_for_previous_grid();
  while (schedule.next(w)) {
    if (loads) {
      barrier_wait_bounded(empty + 8 * stage, phase ^ 1);
      ring[number++ % C::kRing] = w;
      int k = w.k0;
#pragma unroll 1
      for (int i = 0; i < max(w.k_blocks, 1); ++i, k += 64) {
        barrier_wait_bounded(empty + 8 * stage, phase ^ 1);
        if (w.k_blocks == 0) {
          barrier_arrive(full + 8 * stage);
        } else {
          load_stage<C>(p, shared + stage * C::kStageBytes, full + 8 * stage, w, k, pair);
        }
        if (++stage == C::kStages) {
          stage = 0;
          phase ^= 1;
        }
      }
    }
    __syncwarp();
  }
  if (!loads) return;
  barrier_wait_bounded(empty + 8 * stage, phase ^ 1);
  ring[number % C::kRing].kind = kWorkEnd;
  barrier_arrive(full + 8 * stage);
}

// Copies 16 bytes of K of some rows of A to a stage, in the layout of the TMA. Each thread keeps
// the addresses that it reads next: finding those of eight rows in each step took as long as the
// step's products (H200, a layer's first product of 8,192 tokens: 951 -> 781 us).
template <class C>
struct RowGatherer {
  static constexpr int kVectors = 8, kStep = kWarpgroup / kVectors, kPasses = C::kTileM / kStep;

  const u16* from[kPasses];  // the next k block
  u32 exist;                 // a bit for each row that A has

  static TC_DEVICE int vector() { return threadIdx.x % kVectors; }
  static TC_DEVICE int line() { return threadIdx.x / kVectors; }

  TC_DEVICE void find(const Sm90GroupedParams& p, const GroupedWork& w) {
    exist = 0;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int m = w.m0 + line() + i * kStep;
      const int row = m < w.m_end && w.k_blocks > 0 ? p.rows[m] : -1;
      const bool exists = static_cast<u32>(row) < static_cast<u32>(p.a_height);
      if (exists) exist |= 1u << i;
      from[i] = static_cast<const u16*>(p.a_rows) + (exists ? row * p.a_stride : 0) + vector() * 8;
    }
  }

  TC_DEVICE void load(const Sm90GroupedParams& p, u32 stage, int k) {
    const u32 to = stage + line() * 128 + ((vector() ^ (line() & 7)) * 16);
    if (k + 64 <= p.k) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        cp_async<16>(to + i * kStep * 128, from[i], exist >> i & 1);
      }
    } else {  // what follows K may be NaN
      const int bytes = min(max(p.k - k - vector() * 8, 0), 8) * 2;
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const bool reads = bytes > 0 && exist >> i & 1;
        cp_async_bytes(to + i * kStep * 128, reads ? from[i] : p.a_rows, reads ? bytes : 0);
      }
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      from[i] += 64;
    }
  }
};

// produce() by all threads of the producer's warpgroup, which copy A's rows themselves.
template <class C>
TC_DEVICE void produce_gathered(const Sm90GroupedParams& p, u32 shared, u32 full, u32 empty,
                                GroupedWork* ring) {
  Schedule<C> schedule(p);
  const bool pair = p.flags & kGroupedPair, leads = threadIdx.x == 0;
  int stage = 0, number = 0;
  u32 phase = 0;
  GroupedWork w;
  RowGatherer<C> rows;
  wait_for_previous_grid();
  for (bool more = true; more;) {
    more = schedule.next(w);
    if (more) {
      rows.find(p, w);
    } else {
      w.kind = kWorkEnd;
      w.k_blocks = 0;
    }
    int k = 0;
#pragma unroll 1
    for (int i = 0; i < max(w.k_blocks, 1); ++i, k += 64) {
      const u32 arrived = full + 8 * stage, to = shared + stage * C::kStageBytes;
      barrier_wait_bounded(empty + 8 * stage, phase ^ 1);
      if (leads && i == 0) ring[number++ % C::kRing] = w;
      if (w.k_blocks == 0) {
        if (leads) barrier_arrive(arrived);
        barrier_arrive(arrived);
      } else {
        if (leads) {
          barrier_expect(arrived, C::kBBytes);
          load_b<C>(p, to + C::kABytes, arrived, k, w.n0, w.group, pair);
        }
        rows.load(p, to, k);
        // Arrives once the thread's copies have.
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(arrived)
                     : "memory");
      }
      if (++stage == C::kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
}

// ---- consumers ----------------------------------------------------------------------------------

// Overwrites the rows of a stage from `tail` on with zeros, in A and in B: they may hold NaN.
template <class C>
TC_DEVICE void clear_tail(u32 stage, int group, int tail) {
  constexpr int kTailBarrier = 5;
  constexpr int kPanels = C::kTileM / 64 + C::kTileN / 64;
  const u32 zeros[4] = {0, 0, 0, 0};
  for (int panel = group; panel < kPanels; panel += C::kConsumers) {
    const u32 at = stage + panel * kPanelBytes;
    for (int byte = tail * 128 + threadIdx.x % kWarpgroup * 16; byte < kPanelBytes;
         byte += kWarpgroup * 16) {
      store_shared(at + byte, zeros);
    }
  }
  fence_async_proxy();
  named_sync(kTailBarrier, C::kConsumers * kWarpgroup);
}

// Adds the group's bias to one warp's 16 rows; the bias of a gated product has gates and ups, as B.
template <class C>
TC_DEVICE void add_bias(const Sm90GroupedParams& p, const GroupedWork& w, bool gated,
                        float (&sum)[C::kTileN / 2]) {
  using Traits = DTypeTraits<C::kType>;
  const int columns = gated ? 2 * p.n : p.n;
  const bool halves = gated && !(p.flags & kGroupedInterleaved);
  const auto bias = static_cast<const u16*>(p.bias) + static_cast<tc_int64>(w.group) * columns;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int column = column_of_b(p, w.n0, half) + threadIdx.x % 4 * 2;
    const int end = halves && half == 0 ? p.n : columns;
#pragma unroll
    for (int j = 0; j < C::kTileN / 16; ++j) {
      float* const x = sum + half * (C::kTileN / 4) + 4 * j;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int own = column + 8 * j + i;
        const float value = own < end ? Traits::load(bias[own]) : 0.0f;
        x[i] += value;
        x[2 + i] += value;
      }
    }
  }
}

// Multiplies one warp's rows from row m on by their scales.
template <class C>
TC_DEVICE void scale_rows(const Sm90GroupedParams& p, const GroupedWork& w, int m,
                          float (&sum)[C::kTileN / 2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = m + threadIdx.x % 32 / 4 + 8 * half;
    const float scale = row < w.m_end ? p.scale[row] : 0.0f;
#pragma unroll
    for (int j = 0; j < C::kTileN / 8; ++j) {
      sum[4 * j + 2 * half] *= scale;
      sum[4 * j + 2 * half + 1] *= scale;
    }
  }
}

// Stores a panel's rows where out_rows says, a row at a time.
template <class C>
TC_DEVICE void store_panel_scattered(const Sm90GroupedParams& p, u32 panel, int m, int n,
                                     int rows) {
  const int lane = threadIdx.x % 32, columns = p.n - n - 2 * lane;
  const bool pairs = !(p.flags & kGroupedOutUnaligned);
#pragma unroll 4
  for (int row = 0; row < min(rows, 16); ++row) {
    const int to = p.out_rows[m + row];
    if (static_cast<u32>(to) >= static_cast<u32>(p.m) || columns <= 0) continue;
    u32 own;
    asm volatile(
        "ld.shared.u32 %0, [%1];"
        : "=r"(own)
        : "r"(panel + row * 128 + ((lane / 4 ^ panel_swizzle<C>(row)) * 16 + lane % 4 * 4)));
    u16* const out = static_cast<u16*>(p.out) + to * p.out_stride + n + 2 * lane;
    if (pairs) {
      *reinterpret_cast<u32*>(out) = own;
    } else {
      out[0] = static_cast<u16>(own);
      if (columns > 1) out[1] = static_cast<u16>(own >> 16);
    }
  }
}

// Rounds and stores one warp's 16 rows from row m on.
template <class C>
TC_DEVICE void store_rows(const Sm90GroupedParams& p, const GroupedWork& w, u32 staging, int& turn,
                          int m, const float (&sum)[C::kTileN / 2]) {
  const int rows = w.m_end - m, group = kContraction<C> ? w.group : 0;
  const bool scatters = kExperts && p.out_rows != nullptr;
  const bool by_tma = rows >= 16 && !scatters && !(p.flags & kGroupedOutUnaligned);
#pragma unroll
  for (int panel = 0; panel < C::kTileN / 64; ++panel) {
    if (panel * 64 >= p.tile_columns) break;
    const u32 buffer = next_buffer<C>(staging, turn);
    stage_columns<C, 64>(buffer, 0, sum + panel * 32);
    const int n = w.n0 + panel * 64;
    if (by_tma) fence_async_proxy();
    __syncwarp();
    if (by_tma) {
      if (threadIdx.x % 32 == 0 && n < p.n) {
        tma_store(&p.out_map, buffer, n, m, group, 0, 0, kEvictFirst);
      }
    } else if (scatters) {
      store_panel_scattered<C>(p, buffer, m, n, rows);
    } else if (rows > 0 && n < p.n) {
      u16* out = static_cast<u16*>(p.out) + group * p.out_group_stride + m * p.out_stride + n;
      store_panel_unaligned<C>(buffer, out, p.out_stride, min(rows, 16), min(64, p.n - n));
    }
    if (threadIdx.x % 32 == 0) tma_store_commit();  // next_buffer counts a group for each buffer
  }
}

template <class C>
TC_DEVICE void consume(const Sm90GroupedParams& p, u32 shared, u32 full, u32 empty,
                       const GroupedWork* ring, int warp) {
  int stage = 0, number = 0, turn = 0;
  u32 phase = 0;
  const int group = warp / 4, pair = p.flags & kGroupedPair ? 1 : 0;
  // Frees a stage in this block and in the one that shares B with it: one lane of the warpgroup
  // each.
  const int source = threadIdx.x % 32 * 4 + warp % 4;
  const bool frees = source <= pair;
  const u32 target = cluster_rank() ^ static_cast<u32>(source);
  bool leads = C::kConsumers == 2 && group == 0;
  const bool gathers = kExperts && (p.flags & kGroupedGather);
  const int activation = kExperts ? p.flags >> kGroupedActivation & 7 : kActivationNone;
  const u32 staging = shared + C::kStaging + warp * C::kWarpBytes;
  const u64 a0 = wgmma_descriptor(shared + group * C::kBlocksM * kPanelBytes, kPanelBytes, 1024);
  const u64 b0 = wgmma_descriptor(shared + C::kABytes, kPanelBytes, 1024);
  auto let_follow = [&] {
    if (leads) named_arrive(kSkewBarrier, 2 * kWarpgroup);
    leads = false;
  };

  if (C::kConsumers == 2 && group == 1) named_sync(kSkewBarrier, 2 * kWarpgroup);
  auto wait_for_stage = [&] {
    barrier_wait(full + 8 * stage, phase);
    if (gathers) fence_async_proxy();  // A was written by threads
  };
  for (;; ++number) {
    wait_for_stage();
    const GroupedWork& w = ring[number % C::kRing];
    if (w.kind == kWorkEnd) break;
    float sum[C::kBlocksM][C::kTileN / 2];
    int previous = stage;
    auto release_previous = [&] {
      if (frees) barrier_arrive_remote(map_to_rank(empty + 8 * previous, target));
    };
    auto next_stage = [&] {
      previous = stage;
      if (++stage == C::kStages) {
        stage = 0;
        phase ^= 1;
      }
    };
    const int k_blocks = w.k_blocks, tail = w.k_tail;
    auto step = [&](bool last, int add) {
      if constexpr (kContraction<C>) {
        if (last && tail < 64) {
          let_follow();  // the other warpgroup takes part in what follows
          clear_tail<C>(shared + stage * C::kStageBytes, group, tail);
        }
      }
      const u32 offset = stage * (C::kStageBytes >> 4);
      multiply<C>(sum, a0 + offset, b0 + offset, add);
      if (add) {
        wgmma_wait<1>();
        release_previous();
        let_follow();
      }
      next_stage();
    };
    if (kHalfTiles<C> && w.kind == kWorkHalf && w.m0 + group * C::kBlocksM * 64 >= w.m_end) {
      // Its warps wait for those that free its stages, in this block and in the other one: they
      // could not tell a stage's later loads from the one they wait for.
      let_follow();
      named_sync(kGroupBarrier + group, kWarpgroup);
#pragma unroll 1
      for (int i = 0; i < k_blocks; ++i) {
        if (warp % 4 <= pair) wait_for_stage();
        next_stage();
        release_previous();
      }
      named_sync(kGroupBarrier + group, kWarpgroup);
      continue;
    }
    if (k_blocks == 0) {
      const float value = w.kind == kWorkNaN ? __int_as_float(0x7fc00000) : 0.0f;
#pragma unroll
      for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
        for (int j = 0; j < C::kTileN / 2; ++j) sum[i][j] = value;
      }
      // One warp frees the stage for all four, which no wgmma holds together here.
      named_sync(kGroupBarrier + group, kWarpgroup);
      next_stage();
      release_previous();
    } else {
      step(k_blocks == 1, 0);
#pragma unroll 1
      for (int i = 1; i < k_blocks; ++i) {
        wait_for_stage();
        step(i == k_blocks - 1, 1);
      }
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < C::kBlocksM; ++i) keep_in_place(sum[i]);
      release_previous();
    }
    let_follow();
    const int m = w.m0 + group * C::kBlocksM * 64 + warp % 4 * 16;
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
      if constexpr (kExperts) {
        const bool gated = activation != kActivationNone;
        if (p.bias != nullptr && k_blocks > 0) add_bias<C>(p, w, gated, sum[i]);
        if (p.flags & kGroupedInterleaved) {
          apply_gate<C::kTileN / 4, true, true>(sum[i], activation, p.curve);
          exchange_pairs<C::kTileN / 4>(sum[i]);
        } else if (gated) {
          apply_gate<C::kTileN / 4, true>(sum[i], activation, p.curve);
        }
        if (p.scale != nullptr) scale_rows<C>(p, w, m + 64 * i, sum[i]);
      }
      store_rows<C>(p, w, staging, turn, m + 64 * i, sum[i]);
    }
  }
  let_follow();  // there was no tile
  if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();
}

template <class C>
TC_DEVICE void run(const Sm90GroupedParams& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const u32 full = shared + C::kBarriers, empty = full + 8 * C::kStages;
  static_assert(sizeof(GroupedWork) <= 64 && C::kRing > C::kStages);
  auto ring = reinterpret_cast<GroupedWork*>(memory + C::kBarriers + 16 * C::kStages + 16);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const bool pair = p.flags & kGroupedPair;
  const bool gathers = kExperts && (p.flags & kGroupedGather);

  if (threadIdx.x == 0) {
    if (shared % 1024 != 0) asm volatile("trap;");
    if (!gathers) prefetch_tensor_map(&p.a);
    prefetch_tensor_map(&p.b);
    if (!(p.flags & kGroupedOutUnaligned)) prefetch_tensor_map(&p.out_map);
    for (int s = 0; s < C::kStages; ++s) {
      barrier_init(full + 8 * s, gathers ? 1 + kWarpgroup : 1);
      barrier_init(empty + 8 * s, C::kConsumers * (pair ? 2 : 1));
    }
    fence_barrier_init();
  }
  meet_at_start(pair);

  // The next grid's blocks may start as soon as they fit; they wait for the end of this grid.
  launch_next_grid();
  if (warp < 4) {
    if constexpr (C::kConsumers > 1) fewer_registers<C::kProducerRegisters>();
    if (gathers) {
      if constexpr (kExperts) produce_gathered<C>(p, shared, full, empty, ring);
    } else if (warp == 0) {
      produce<C>(p, shared, full, empty, ring);
    } else {
      wait_for_previous_grid();
    }
    __syncwarp();
  } else {
    if constexpr (C::kConsumers > 1) more_registers<C::kConsumerRegisters>();
    wait_for_previous_grid();
    consume<C>(p, shared, full, empty, ring, warp - 4);
  }
  // A block must not exit while the other one of its cluster may still write to its shared memory.
  if (pair) cluster_meet();
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, 1)
    TC_KERNEL(const __grid_constant__ Sm90GroupedParams p) {
  using C = Config<DType::TC_DTYPE, TC_A_MN, TC_B_MN, TC_TILE_M, TC_TILE_N, TC_STAGES, TC_CONSUMERS,
                   false, false, false>;
  static_assert(C::kThreads == TC_THREADS && C::kSharedBytes == TC_DYNAMIC_SHARED);
  static_assert(C::kTileK == TC_TILE_K && C::kPanel == 64, "128 bytes of K and of a panel");
  static_assert(C::kTileN % 128 == 0, "halves of whole panels");
  run<C>(p);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "defaults": {
  "name": "sm90_grouped_matmul_{d.short}_{l.layout}_{t.tile.0}x{t.tile.1}", "family": "grouped",
  "kind": "sm90_grouped", "layout": "{l.layout}", "tile": "{t.tile}",
  "block": ["{t.threads}", 1, 1], "stages": "{t.stages}", "dynamic_shared": "{t.shared}",
  "cost": {}, "experts": "{t.experts}",
  "defines": {"TC_DTYPE": "{d.dtype}", "TC_CONSUMERS": "{t.consumers}", "TC_EXPERTS": "{t.experts}",
              "TC_A_MN": "{l.a_mn}", "TC_B_MN": "{l.b_mn}"}, "for": {"d": "bf16 f16"}},
 "kernels": [
  {"for": {
    "l": [{"layout": "nt", "a_mn": 0, "b_mn": 0}, {"layout": "nn", "a_mn": 0, "b_mn": 1}],
    "t": [
     ["tile", "stages", "consumers", "threads", "shared", "experts"],
     [[128, 256, 64], 4, 2, 384, 230992, 1],
     [[128, 128, 64], 6, 2, 384, 230512, 0],
     [[64, 256, 64],  5, 1, 256, 230496, 1],
     [[64, 128, 64],  8, 1, 256, 230800, 0]]}},
  {"for": {
    "l": [{"layout": "tn", "a_mn": 1, "b_mn": 1}],
    "t": [
     ["tile", "stages", "consumers", "threads", "shared", "experts"],
     [[128, 256, 64], 4, 2, 384, 230992, 0],
     [[128, 128, 64], 6, 2, 384, 230512, 0]]}}]}
*/
