// Quantises tiles of 128 x 128 to 8-bit floats, with a scale for the tile or for each of its
// columns, and transposes them if requested; bound by memory. quantize_params.h defines the result.
//
// Roles: all threads are alike. A block has one tile; a thread has 8 adjacent rows of 8 adjacent
// columns, so that it can write 8 adjacent elements of either. A transposed tile goes through
// shared memory.
//
// Tiles of blocks of groups' rows have up to 128 rows; what they write ends with the block. They,
// and tiles with a scale that are written both as they are and transposed, have code apart from
// others'.
#include "numbers.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr DType kType = DType::TC_DTYPE;
constexpr int kTile = TC_TILE_M, kLanes = kTile / kEight, kWarps = TC_THREADS / 32;
static_assert(kTile == TC_TILE_N && kLanes * kLanes == TC_THREADS);

// Eight bytes of a transposed tile in shared memory: rows `row` to `row` + 7 of a column. Their
// order is swizzled, since both 16 neighbouring multiples of 8 columns and of 8 rows are accessed
// together.
TC_DEVICE uint2* transposed(unsigned char* tile, int column, int row) {
  return reinterpret_cast<uint2*>(tile + column * kTile +
                                  (row / kEight ^ column / kEight) * kEight);
}

// The largest that kLanes neighbouring lanes have of a row of eight: of row lane / 2 % 8.
// `of_row(i)` is the lane's own largest of row i.
template <class OfRow>
TC_DEVICE float largest_of_eight_rows(OfRow of_row) {
  static_assert(kLanes == 2 * kEight);
  float x[kEight / 2];
  const auto exchange = [](float mine, float theirs, int lanes) {
    const bool upper = threadIdx.x & lanes;
    const float other = __shfl_xor_sync(~0u, upper ? mine : theirs, lanes);
    return fmaxf(upper ? theirs : mine, other);
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = exchange(of_row(i), of_row(i + 4), 8);
#pragma unroll
  for (int i = 0; i < 2; ++i) x[i] = exchange(x[i], x[i + 2], 4);
  x[0] = exchange(x[0], x[1], 2);
  return fmaxf(x[0], __shfl_xor_sync(~0u, x[0], 1));
}

enum Tiles { kPlain, kGroups, kBoth };

// A tile of block `tile_row`, whose rows, and where they are in the transposed result, are `block`.
template <bool kVectors, bool kE5m2, Tiles kTiles>
TC_DEVICE void quantize_tile(const QuantizeParams& p, const GroupBlock& block, int tile_row,
                             int tile_column, float (*maxima)[kTile], unsigned char* tile) {
  const int own_column = threadIdx.x % kLanes * kEight, own_row = threadIdx.x / kLanes * kEight;
  const int column = tile_column * kTile + own_column, row = block.m0 + own_row;
  const bool columns = kTiles != kBoth && p.flags & kQuantizeColumns;
  const bool powers = p.flags & kQuantizePowerOfTwo;
  const bool e5m2 = kVectors ? kE5m2 : p.flags & kQuantizeE5m2;

  Eight<kType> sources[kEight];
  const auto x = static_cast<const typename Eight<kType>::Storage*>(p.x) + column;
  if (kTiles == kGroups && p.numbers != nullptr) {
    int numbers[kEight];
#pragma unroll
    for (int i = 0; i < kEight; ++i) numbers[i] = row + i < block.m_end ? p.numbers[row + i] : -1;
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      const bool exists = static_cast<u32>(numbers[i]) < static_cast<u32>(p.x_rows);
      sources[i].load<kVectors>(x + numbers[i] * p.x_stride, exists ? p.columns - column : 0);
    }
  } else {
    auto from = x + row * p.x_stride;
#pragma unroll
    for (int i = 0; i < kEight; ++i, from += p.x_stride) {
      sources[i].load<kVectors>(from, row + i < block.m_end ? p.columns - column : 0);
    }
  }
  Eight<kType> most;
#pragma unroll
  for (Eight<kType>& own : sources) {
    own.drop_infinities();
    most.keep_larger(own);
  }
  if (kTiles == kGroups && p.row_data != nullptr) {
    float* scales = p.row_scales + tc_int64{tile_column} * p.rows + row;
    const int lane = threadIdx.x % 32;
    // A lane finds the scale of one of its rows. Of float32, for which registers do not suffice, of
    // each.
    constexpr bool kOne = kType != DType::float32;
    float own_inverse = 0.0f;
    if constexpr (kOne) {
      const float largest = largest_of_eight_rows([&](int i) { return sources[i].largest(); });
      const float scale = float8_scale(largest, e5m2, powers);
      const int own = lane / 2 % kEight;
      if (lane % 2 == 0 && row + own < block.m_end) scales[own] = scale;
      own_inverse = __frcp_rn(scale);
    }
    unsigned char* to = p.row_data + tc_int64{row} * p.columns + column;
#pragma unroll
    for (int i = 0; i < kEight; ++i, to += p.columns) {
      const bool exists = row + i < block.m_end;
      float of_row;
      if constexpr (kOne) {
        of_row = __shfl_sync(~0u, own_inverse, (lane & kLanes) + 2 * i);
      } else {
        const float largest = largest_of_lanes<kLanes>(sources[i].largest());
        const float scale = float8_scale(largest, e5m2, powers);
        if (own_column == 0 && exists) scales[i] = scale;
        of_row = __frcp_rn(scale);
      }
      float inverses[kEight];
#pragma unroll
      for (float& own : inverses) own = of_row;
      store_eight(to, quantized(sources[i], inverses, e5m2), exists ? p.columns - column : 0,
                  kVectors);
    }
  }
  float inverse[kEight];
  if (columns) {
    Eight<kType> others;
#pragma unroll
    for (int i = 0; i < most.kWords; ++i) {
      others.words[i] = __shfl_xor_sync(~0u, most.words[i], kLanes);
    }
    most.keep_larger(others);
    float x[kEight];
    most.unpack(x);
#pragma unroll
    for (int j = 0; j < kEight; ++j) {
      if (threadIdx.x % 32 < kLanes) maxima[threadIdx.x / 32][own_column + j] = fabsf(x[j]);
    }
    __syncthreads();
    const int own = threadIdx.x, of_x = tile_column * kTile + own;
    if (own < kTile) {
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) largest = fmaxf(largest, maxima[i][own]);
      const float scale = float8_scale(largest, e5m2, powers);
      maxima[0][own] = __frcp_rn(scale);
      if (of_x < p.columns) p.scales[of_x * p.scale_stride + tile_row * p.scale_stride_k] = scale;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kEight; ++j) inverse[j] = maxima[0][own_column + j];
  } else {
    const float scale = float8_scale(largest_of_block(most.largest(), maxima[0]), e5m2, powers);
#pragma unroll
    for (int j = 0; j < kEight; ++j) inverse[j] = __frcp_rn(scale);
    if (threadIdx.x == 0) {
      p.scales[tile_row * p.scale_stride + tile_column * p.scale_stride_k] = scale;
      if (kTiles == kBoth) p.row_scales[blockIdx.x] = scale;
    }
  }

  if (kTiles == kBoth || !(p.flags & kQuantizeTransposed)) {
    // Rows that are read by vectors are written by vectors.
    const bool vectors = kVectors || (kTiles != kBoth && p.flags & kQuantizeOutVectors);
    const tc_int64 stride = kTiles == kBoth ? p.columns : p.data_stride;
    unsigned char* to = (kTiles == kBoth ? p.row_data : p.data) + row * stride + column;
#pragma unroll
    for (int i = 0; i < kEight; ++i, to += stride) {
      const uint2 bytes = quantized(sources[i], inverse, e5m2);
      store_eight(to, bytes, row + i < block.m_end ? p.columns - column : 0, vectors);
    }
    if (kTiles != kBoth) return;
  }
#pragma unroll
  for (int j = 0; j < kEight; ++j) {
    float x[kEight];
#pragma unroll
    for (int i = 0; i < kEight; ++i) x[i] = sources[i].element(j) * inverse[j];
    *transposed(tile, own_column + j, own_row) = pack_eight(x, e5m2);
  }
  __syncthreads();
  // Rows of the result: kLanes threads each. NOTE: all loads, then all stores, with the code of
  // single bytes apart: between a vector's load and its store it took 0.3 us of 8.3 (4096 x 2048,
  // H200).
  const int of_tile = threadIdx.x / kLanes, left = p.columns - tile_column * kTile - of_tile;
  const int at = block.to + own_column;
  unsigned char* to = p.data + (tile_column * kTile + of_tile) * p.data_stride + at;
  if (p.flags & kQuantizeOutVectors) {
    uint2 bytes[kEight];
#pragma unroll
    for (int i = 0; i < kEight; ++i) bytes[i] = *transposed(tile, of_tile + i * kLanes, own_column);
#pragma unroll
    for (int i = 0; i < kEight; ++i, to += kLanes * p.data_stride) {
      store_eight(to, bytes[i], i * kLanes < left ? block.to_end - at : 0, true);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kTile && i < left; i += kLanes, to += kLanes * p.data_stride) {
    store_eight(to, *transposed(tile, of_tile + i, own_column), block.to_end - at, false);
  }
}

template <bool kVectors, bool kE5m2, Tiles kTiles>
TC_DEVICE void run(const QuantizeParams& p, float (*maxima)[kTile], unsigned char* tile) {
  const int tiles_k = (p.columns + kTile - 1) / kTile;
  const int row = blockIdx.x / tiles_k, column = blockIdx.x % tiles_k;
  const GroupBlock block = {row * kTile, p.rows, row * kTile, p.rows};
  quantize_tile<kVectors, kE5m2, kTiles>(p, block, row, column, maxima, tile);
}

// The same of blocks of groups, apart from the most common calls, which have no code between their
// loads (H200, 1024 x 4096: 4.7 us, and 4.8 with it).
template <bool kVectors>
TC_DEVICE void run_groups(const QuantizeParams& p, float (*maxima)[kTile], unsigned char* tile) {
  const int tiles_k = (p.columns + kTile - 1) / kTile;
  const int number = blockIdx.x / tiles_k, column = blockIdx.x % tiles_k;
  const int blocks = p.blocks[0].m0;  // NOTE: in flight with the next load, which may find no block
  const GroupBlock block = p.blocks[1 + number];
  if (number >= blocks) return;
  quantize_tile<kVectors, false, kGroups>(p, block, number, column, maxima, tile);
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, kType == DType::float32 ? 2 : 3)
    TC_KERNEL(const __grid_constant__ QuantizeParams p) {
  __shared__ float maxima[kWarps][kTile];
  __shared__ __align__(16) unsigned char tile[kTile * kTile];
  launch_next_grid();  // 0.4 to 2.6% of 7 us less than after the wait (H200, 4096 x 2048)
  wait_for_previous_grid();
  if (!(p.flags & kQuantizeApart)) {
    if (!(p.flags & kQuantizeVectors)) {
      run<false, false, kPlain>(p, maxima, tile);
    } else if (p.flags & kQuantizeE5m2) {
      run<true, true, kPlain>(p, maxima, tile);
    } else {
      run<true, false, kPlain>(p, maxima, tile);
    }
  } else if (p.blocks != nullptr) {
    if (p.flags & kQuantizeVectors) {
      run_groups<true>(p, maxima, tile);
    } else {
      run_groups<false>(p, maxima, tile);
    }
  } else if (p.flags & kQuantizeVectors) {
    run<true, false, kBoth>(p, maxima, tile);
  } else {
    run<false, false, kBoth>(p, maxima, tile);
  }
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "tiles_quantize_{d.short}", "kind": "tiles", "math": "float32", "alignment": 1,
   "tile": [128, 128, 1], "block": [256, 1, 1], "cost": {}, "defines": {"TC_DTYPE": "{d.dtype}"},
   "for": {"d": "f16 bf16 f32"}}]}
*/
