// Quantises rows to 8-bit floats, with a scale for each 128 columns or for a row; bound by memory.
// quantize_params.h defines the result.
//
// Roles: of `block` and `gated` kernels 16 lanes have 128 columns, and a thread reads kTogether of
// them before it waits. Of `row` kernels a block has a row, which it reads twice: the second time
// from a cache.
#include "numbers.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr DType kType = DType::TC_DTYPE;
enum Mode { kBlock, kGated, kRow };
constexpr Mode kMode = Mode::TC_MODE;
constexpr int kLanes = 16, kBlockColumns = 128, kTogether = kMode == kGated ? 2 : 4;
static_assert(TC_TILE_M == kTogether * TC_THREADS / kLanes || kMode == kRow);

TC_DEVICE void load(float (&x)[kEight], const QuantizeParams& p, tc_int64 row, int column) {
  const tc_int64 at = row * p.x_stride + column;
  const int count = p.columns - column;
  const bool vectors = p.flags & kQuantizeVectors;
  load_eight<kType>(x, p.x, at, count, vectors);
  if constexpr (kMode == kGated) {
    float up[kEight];
    load_eight<kType>(up, p.x, at + p.up, count, vectors);
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      constexpr float kLog2e = 1.44269504f;
      x[i] = __fdividef(x[i], 1.0f + exp2_approx(-kLog2e * x[i])) * up[i];
    }
  }
  drop_infinities(x);
}

TC_DEVICE void store(const QuantizeParams& p, tc_int64 row, int column, const float (&x)[kEight],
                     float scale) {
  store_eight(p.data + row * p.data_stride + column, quantized(x, __fdiv_rn(1.0f, scale), p.flags),
              p.columns - column, p.flags & kQuantizeOutVectors);
}

TC_DEVICE void quantize_blocks(const QuantizeParams& p) {
  const u32 blocks = (p.columns + kBlockColumns - 1) / kBlockColumns;  // of a row
  const u32 total = blocks * p.rows;
  const u32 first = blockIdx.x * TC_TILE_M + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  float x[kTogether][kEight];
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    const u32 own = first + i * (TC_THREADS / kLanes), row = own / blocks;
    const int column = (own - row * blocks) * kBlockColumns + lane * kEight;
    if (own < total) {
      load(x[i], p, row, column);
    } else {
#pragma unroll
      for (int j = 0; j < kEight; ++j) x[i][j] = 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    const u32 own = first + i * (TC_THREADS / kLanes), row = own / blocks;
    const u32 block = own - row * blocks;
    const float scale = scale_of(largest_of_lanes<kLanes>(largest_of(x[i])), p.flags);
    if (own >= total) continue;
    store(p, row, block * kBlockColumns + lane * kEight, x[i], scale);
    if (lane == 0) p.scales[row * p.scale_stride + block * p.scale_stride_k] = scale;
  }
}

TC_DEVICE void quantize_row(const QuantizeParams& p) {
  __shared__ float maxima[TC_THREADS / 32];
  const tc_int64 row = blockIdx.x;
  float largest = 0.0f;
#pragma unroll 4
  for (int column = threadIdx.x * kEight; column < p.columns; column += TC_THREADS * kEight) {
    float x[kEight];
    load(x, p, row, column);
    largest = largest_of(x, largest);
  }
  const float scale = scale_of(largest_of_block(largest, maxima), p.flags);
#pragma unroll 4
  for (int column = threadIdx.x * kEight; column < p.columns; column += TC_THREADS * kEight) {
    float x[kEight];
    load(x, p, row, column);
    store(p, row, column, x, scale);
  }
  if (threadIdx.x == 0) p.scales[row * p.scale_stride] = scale;
}

extern "C" __global__ void __launch_bounds__(TC_THREADS)
    TC_KERNEL(const __grid_constant__ QuantizeParams p) {
  wait_for_previous_kernel();
  if constexpr (kMode == kRow) {
    quantize_row(p);
  } else {
    quantize_blocks(p);
  }
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "rows_quantize_{d.name}_{m.name}", "kind": "rows", "archs": ["sm_90a"],
   "dtype": "{d.dtype}", "math": "float32", "layout": "any", "alignment": 1,
   "tile": ["{m.blocks}", 128, 1], "stages": 1, "block": [256, 1, 1], "dynamic_shared": 0,
   "cost": {}, "mode": "{m.name}", "defines": {"TC_DTYPE": "{d.dtype}", "TC_MODE": "{m.mode}"},
   "for": {
    "d": [{"name": "f16", "dtype": "float16"}, {"name": "bf16", "dtype": "bfloat16"},
          {"name": "f32", "dtype": "float32"}],
    "m": [{"name": "block", "mode": "kBlock", "blocks": 64},
          {"name": "gated", "mode": "kGated", "blocks": 32},
          {"name": "row", "mode": "kRow", "blocks": 1}]}}]}
*/
