// Which tile a block computes, and where that tile's operands begin. Independent of shared memory
// and instructions.
#pragma once

#include "common/dtype.cuh"
#include "matmul_params.h"

namespace torch_cubin {

// The kernel table's names: its "layout" is pasted after `::`.
enum class Layout { nn, nt, tn, tt, any };

// One block's tile. Offsets are in elements.
struct TileCoordinates {
  tc_int64 m0, n0;          // first row and column
  tc_int64 a, b, c;         // offsets of the tile's first row of A, column of B, element of C
  tc_int64 partial;         // offset of the tile's first element in `partial`
  tc_int64 k_begin, k_end;  // this block's share of K
  int k_tiles;              // number of k tiles in it, 0 for a split past the end of K
};

// The tile order, in which concurrent blocks share rows of A and columns of B in L2: groups of
// about 2048 rows, and within a group column by column.
template <int kTileM>
TC_DEVICE void raster(u32 index, u32 tiles_m, u32 tiles_n, u32& tile_m, u32& tile_n) {
  u32 group_rows = min(tiles_m, 2048u / kTileM);  // so that the product below stays under 2^31
  u32 group = index / (group_rows * tiles_n);
  u32 within = index - group * (group_rows * tiles_n);
  u32 rows = min(tiles_m - group * group_rows, group_rows);
  tile_n = within / rows;
  tile_m = group * group_rows + within - tile_n * rows;
}

struct TileIndex {
  u32 m, n, batch;
};

// grid.x is below 2^31, so 32-bit divisions suffice (a 64-bit one costs about 100 instructions);
// offsets are 64-bit throughout.
template <int kTileM>
TC_DEVICE TileIndex tile_index(const MatmulParams& p, u32 number) {
  TileIndex index;
  u32 tiles = static_cast<u32>(p.tiles_m) * static_cast<u32>(p.tiles_n);
  index.batch = p.batch > 1 ? number / tiles : 0;
  raster<kTileM>(number - index.batch * tiles, static_cast<u32>(p.tiles_m),
                 static_cast<u32>(p.tiles_n), index.m, index.n);
  return index;
}

template <int kTileM>
TC_DEVICE TileIndex tile_index(const MatmulParams& p) {
  return tile_index<kTileM>(p, blockIdx.x);
}

template <int kTileM, int kTileN, int kTileK>
TC_DEVICE TileCoordinates tile_coordinates(const MatmulParams& p, const TileIndex& index) {
  TileCoordinates t;
  t.m0 = static_cast<tc_int64>(index.m) * kTileM;
  t.n0 = static_cast<tc_int64>(index.n) * kTileN;
  t.a = t.m0 * p.a_stride_m;
  t.b = t.n0 * p.b_stride_n;
  t.c = index.batch * p.m * p.n + t.m0 * p.c_stride_m + t.n0 * p.c_stride_n;
  t.partial = ((blockIdx.y * p.batch + index.batch) * p.m + t.m0) * p.n + t.n0;
  u32 rest = index.batch;
#pragma unroll
  for (int i = 0; i < kMaxBatchDims; ++i) {
    if (rest == 0) break;
    u32 size = static_cast<u32>(p.batch_size[i]);
    u32 next = rest / size;
    u32 position = rest - next * size;
    t.a += position * p.a_batch_stride[i];
    t.b += position * p.b_batch_stride[i];
    rest = next;
  }
  tc_int64 per_split = p.k_tiles_per_split * kTileK;
  t.k_begin = min(blockIdx.y * per_split, p.k);
  t.k_end = p.splits > 1 ? min(t.k_begin + per_split, p.k) : p.k;
  t.k_tiles = static_cast<int>((t.k_end - t.k_begin + kTileK - 1) / kTileK);
  t.a += t.k_begin * p.a_stride_k;
  t.b += t.k_begin * p.b_stride_k;
  return t;
}

template <int kTileM, int kTileN, int kTileK>
TC_DEVICE TileCoordinates tile_coordinates(const MatmulParams& p) {
  return tile_coordinates<kTileM, kTileN, kTileK>(p, tile_index<kTileM>(p));
}

// bias[n0 + column], or 0 without a bias.
template <DType kDType>
TC_DEVICE auto load_bias(const MatmulParams& p, tc_int64 column) {
  using Traits = DTypeTraits<kDType>;
  auto bias = static_cast<const typename Traits::Storage*>(p.bias);
  return Traits::load(bias[column * p.bias_stride]);
}

}  // namespace torch_cubin
