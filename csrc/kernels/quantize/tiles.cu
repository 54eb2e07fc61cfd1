// Quantises tiles of 128 x 128 to 8-bit floats, with a scale for the tile or for each of its
// columns, and transposes them if requested; bound by memory. quantize_params.h defines the result.
//
// Roles: all threads are alike. A block has one tile; a thread has 8 adjacent rows of 8 adjacent
// columns, so that it can write 8 adjacent elements of either. A transposed tile goes through
// shared memory.
#include "numbers.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr DType kType = DType::TC_DTYPE;
constexpr int kTile = TC_TILE_M, kLanes = kTile / kEight, kWarps = TC_THREADS / 32;
constexpr int kPitch = kTile + 8;  // bytes of a transposed row
static_assert(kTile == TC_TILE_N && kLanes * kLanes == TC_THREADS);

// 8 x 8 bytes, rows to columns.
TC_DEVICE void transpose_eight(uint2 (&rows)[kEight]) {
  uint2 out[kEight];
#pragma unroll
  for (int column = 0; column < kEight; ++column) {
    const u32 select = column % 4 | (column % 4 + 4) << 4;
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 first = column < 4 ? rows[2 * i].x : rows[2 * i].y;
      const u32 second = column < 4 ? rows[2 * i + 1].x : rows[2 * i + 1].y;
      pairs[i] = __byte_perm(first, second, select);
    }
    out[column] = make_uint2(__byte_perm(pairs[0], pairs[1], 0x5410),
                             __byte_perm(pairs[2], pairs[3], 0x5410));
  }
#pragma unroll
  for (int i = 0; i < kEight; ++i) rows[i] = out[i];
}

extern "C" __global__ void __launch_bounds__(TC_THREADS)
    TC_KERNEL(const __grid_constant__ QuantizeParams p) {
  __shared__ float maxima[kWarps][kTile];
  __shared__ __align__(16) unsigned char tile[kTile * kPitch];
  wait_for_previous_kernel();
  const int tiles_k = (p.columns + kTile - 1) / kTile;
  const int tile_row = blockIdx.x / tiles_k, tile_column = blockIdx.x % tiles_k;
  const int own_column = threadIdx.x % kLanes * kEight, own_row = threadIdx.x / kLanes * kEight;
  const int column = tile_column * kTile + own_column, row = tile_row * kTile + own_row;
  const bool columns = p.flags & kQuantizeColumns;

  float x[kEight][kEight];
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    const int count = row + i < p.rows ? p.columns - column : 0;
    load_eight<kType>(x[i], p.x, (row + i) * p.x_stride + column, count,
                      p.flags & kQuantizeVectors);
    drop_infinities(x[i]);
  }

  float inverse[kEight];
  if (columns) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < kEight; ++j) {
      float most = 0.0f;
#pragma unroll
      for (int i = 0; i < kEight; ++i) most = fmaxf(most, fabsf(x[i][j]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, kLanes));
      if (threadIdx.x % 32 < kLanes) maxima[warp][own_column + j] = most;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kEight; ++j) {
      float most = 0.0f;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) most = fmaxf(most, maxima[i][own_column + j]);
      const float scale = scale_of(most, p.flags);
      inverse[j] = __fdiv_rn(1.0f, scale);
      if (own_row == 0 && column + j < p.columns) {
        p.scales[(column + j) * p.scale_stride + tile_row * p.scale_stride_k] = scale;
      }
    }
  } else {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < kEight; ++i) most = largest_of(x[i], most);
    const float scale = scale_of(largest_of_block(most, maxima[0]), p.flags);
#pragma unroll
    for (int j = 0; j < kEight; ++j) inverse[j] = __fdiv_rn(1.0f, scale);
    if (threadIdx.x == 0) {
      p.scales[tile_row * p.scale_stride + tile_column * p.scale_stride_k] = scale;
    }
  }

  uint2 bytes[kEight];
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
#pragma unroll
    for (int j = 0; j < kEight; ++j) x[i][j] *= inverse[j];
    bytes[i] = quantized(x[i], 1.0f, p.flags);
  }
  const bool vectors = p.flags & kQuantizeOutVectors;
  if (!(p.flags & kQuantizeTransposed)) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      if (row + i < p.rows) {
        store_eight(p.data + (row + i) * p.data_stride + column, bytes[i], p.columns - column,
                    vectors);
      }
    }
    return;
  }
  transpose_eight(bytes);
#pragma unroll
  for (int j = 0; j < kEight; ++j) {
    *reinterpret_cast<uint2*>(tile + (own_column + j) * kPitch + own_row) = bytes[j];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEight; ++i) {  // rows of the result: kLanes threads each
    const int of_tile = threadIdx.x / kLanes + i * kLanes, to = tile_column * kTile + of_tile;
    const int at = tile_row * kTile + own_column;
    if (to < p.columns) {
      store_eight(p.data + to * p.data_stride + at,
                  *reinterpret_cast<const uint2*>(tile + of_tile * kPitch + own_column),
                  p.rows - at, vectors);
    }
  }
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "tiles_quantize_{d.name}", "kind": "tiles", "archs": ["sm_90a"],
   "dtype": "{d.dtype}", "math": "float32", "layout": "any", "alignment": 1,
   "tile": [128, 128, 1], "stages": 1, "block": [256, 1, 1], "dynamic_shared": 0,
   "cost": {}, "defines": {"TC_DTYPE": "{d.dtype}"},
   "for": {
    "d": [{"name": "f16", "dtype": "float16"}, {"name": "bf16", "dtype": "bfloat16"},
          {"name": "f32", "dtype": "float32"}]}}]}
*/
