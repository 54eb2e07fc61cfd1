// A block's tile of a product of groups, as a tile of a product of its own.
#pragma once

#include "groups_schedule.cuh"
#include "tile.cuh"

namespace torch_cubin {

template <DType kDType, int kTileM, int kTileN, bool kContraction, class Compute>
TC_DEVICE void compute_tile_of_group(const GroupedMatmulParams& g, Compute&& compute) {
  using Storage = typename DTypeTraits<kDType>::Storage;
  GroupedSchedule<GroupedMatmulParams, kContraction, kTileM> schedule(g);
  GroupedWork work;
  if (!schedule.next(work)) return;
  MatmulParams p = g.matmul;
  auto a = static_cast<const Storage*>(p.a);
  auto b = static_cast<const Storage*>(p.b);
  auto c = static_cast<Storage*>(p.c);
  const tc_int64 group = work.group;
  TileIndex index{0, static_cast<u32>(work.n0 / kTileN), 0};
  if constexpr (kContraction) {
    a += work.k0 * p.a_stride_k;
    b += work.k0 * p.b_stride_k;
    c += group * p.m * p.n;
    p.k = work.k_blocks == 0 ? 0 : (work.k_blocks - 1) * 64 + work.k_tail;
    index.m = static_cast<u32>(work.m0 / kTileM);
  } else {  // the tile is the first one of the rows that follow it
    a += work.m0 * p.a_stride_m;
    b += group * g.b_group_stride;
    c += work.m0 * p.c_stride_m;
    p.m = work.m_end - work.m0;
    if (work.k_blocks == 0) p.k = 0;
  }
  p.a = a;
  p.b = b;
  p.c = c;
  compute(p, index, work.kind == kWorkNaN);
}

// Calls compute(product, tile, is_wrong) for the block's tile, if it has one. With `is_wrong` the
// outputs are NaN.
template <DType kDType, int kTileM, int kTileN, class Compute>
TC_DEVICE void compute_tile_of_group(const GroupedMatmulParams& g, Compute&& compute) {
  if (g.flags & kGroupedContract) {
    compute_tile_of_group<kDType, kTileM, kTileN, true>(g, compute);
  } else {
    compute_tile_of_group<kDType, kTileM, kTileN, false>(g, compute);
  }
}

}  // namespace torch_cubin
