// How a block with one tile, or one part of its K, loads it: sooner than the producer of many
// tiles.
#pragma once

#include "sm90_edge.cuh"
#include "sm90_split.cuh"
#include "sm90_tiles.cuh"

namespace torch_cubin {
namespace sm90 {

// Whether blocks begin sooner if they have one tile. (Not those of clusters that share operands: a
// tile that is found while another warp makes the barriers is there before all blocks have met.)
template <class C>
constexpr bool kStartsEarly = !C::kReads && !C::kFromRegisters;

// Whether each block, or each cluster that splits K, has one tile that produce_lone() loads.
template <class C>
TC_DEVICE bool is_lone(const Sm90MatmulParams& p) {
  if constexpr (kStartsEarly<C>) return p.flags & kSm90Lone;
  return false;
}

// The producer of a block with one tile, or a part of its K. Some 20 instructions find it.
template <class C>
TC_DEVICE void produce_lone(const Sm90MatmulParams& p, u32 shared, u32 full, u32 empty, Work* ring,
                            bool first) {
  const bool of_a = C::kProducers == 1 || first, of_b = C::kProducers == 1 || !first;
  u32 tile = blockIdx.x, begin = 0, end = p.k_blocks;
  int log = 0;  // of the parts of K
  if (C::kSplitsK && (p.flags & kSm90OverK)) {
    log = log_parts<C>(p);
    const u32 size = 1 << log, rank = tile & (size - 1);
    const auto first_of = [&](u32 part) { return (part * end + size - 1) >> log; };
    tile >>= log;
    begin = first_of(rank);
    end = first_of(rank + 1);
  }
  Work w;
  w.b0 = w.b1 = w.b2 = 0;
  const bool batched = C::kConsumers > 1 && (p.flags & kSm90Batched);
  if (batched) {
    const u32 one = p.tiles_m * p.tiles_n;
    w.b0 = tile / one;
    tile -= w.b0 * one;
  }
  const u32 column = tile / static_cast<u32>(p.tiles_m);
  w.m0 = (tile - column * p.tiles_m) * C::kTileM;
  w.n0 = column * C::kTileN;
  begin_sooner<C>(p, w);
  w.k_count = end - begin;
  w.k_first = begin;
  w.k_step = 1;
  w.streamed = 0;
  const Share alone = {0, 0, 1};
  int stage = 0, k = begin * C::kTileK;
  u32 phase = 0, base = shared;
  asm volatile("mov.u32 %0, %1;" : "=r"(base) : "r"(shared));  // else each load computes it again
  if (of_a) ring[0] = w;
  const auto load = [&](int i, auto is_first) {
    const u32 arrived = base + C::kBarriers + 8 * stage, to = base + stage * C::kStageBytes;
    if (i >= C::kStages) barrier_wait_bounded(arrived + 8 * C::kStages, phase ^ 1);
    barrier_expect(arrived, (of_a ? C::kABytes : 0) + (of_b ? C::kBBytes : 0));
    if constexpr (decltype(is_first)::value) wait_for_previous_grid();
    if (of_a) {
      load_operand<C::kAMnMajor, C::kTileM, C::kTileK>(p.a, to, arrived, alone, batched, w.m0, k,
                                                       w);
    }
    if (of_b) {
      load_b<C>(p.b, to + C::kABytes, arrived, alone, batched, w.n0, k, w);
    }
    k += C::kTileK;
    if (++stage == C::kStages) {
      stage = 0;
      phase ^= 1;
    }
  };
  load(0, Constant<1>{});
#pragma unroll 1
  for (int i = 1; i < w.k_count; ++i) load(i, Constant<0>{});
  barrier_wait_bounded(empty + 8 * stage, phase ^ 1);
  if (of_a) ring[1].k_count = 0;
  barrier_arrive(full + 8 * stage);
}

}  // namespace sm90
}  // namespace torch_cubin
