// Quantises rows to 8-bit floats, with a scale for each 128 columns or for a row; bound by memory.
// quantize_params.h defines the result.
//
// Roles: of `block` and `gated` kernels 8 lanes have 128 columns, twice 8 each, and a thread loads
// kTogether such blocks before it uses them. Of `row` kernels a block has a row; a thread keeps its
// first kKept times 8 elements, and reads others twice, the second time from a cache.
#include "numbers.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr DType kType = DType::TC_DTYPE;
enum Mode { kBlock, kGated, kRow };
constexpr Mode kMode = Mode::TC_MODE;
constexpr int kLanes = 8, kBlockColumns = 128, kTogether = kMode == kGated ? 1 : 2;
constexpr int kEights = kBlockColumns / (kLanes * kEight);  // of a thread in a block
constexpr int kKept = 4;
static_assert(TC_TILE_M == kTogether * TC_THREADS / kLanes || kMode == kRow);

// Eight elements, or the eight gates and eight ups that they are made of.
struct Source {
  Eight<kType> x, up;

  template <bool kVectors>
  TC_DEVICE void load(const QuantizeParams& p, tc_int64 row, int column, bool exists = true) {
    const tc_int64 at = row * p.x_stride + column;
    const int count = exists ? p.columns - column : 0;
    x.load<kVectors>(p.x, at, count);
    if constexpr (kMode == kGated) up.load<kVectors>(p.x, at + p.up, count);
  }

  TC_DEVICE void values(float (&to)[kEight]) const {
    x.unpack(to);
    if constexpr (kMode == kGated) {
      float factors[kEight];
      up.unpack(factors);
#pragma unroll
      for (int i = 0; i < kEight; ++i) to[i] = gated_by_silu(to[i], factors[i]);
    }
    drop_infinities(to);
  }
};

TC_DEVICE void store(const QuantizeParams& p, tc_int64 row, int column, const float (&x)[kEight],
                     float inverse) {
  store_eight(p.data + row * p.data_stride + column, quantized(x, inverse, p.flags),
              p.columns - column, p.flags & kQuantizeOutVectors);
}

template <bool kVectors>
TC_DEVICE void quantize_blocks(const QuantizeParams& p) {
  const u32 blocks = (p.columns + kBlockColumns - 1) / kBlockColumns;  // of a row
  const u32 total = blocks * p.rows;
  const int lane = threadIdx.x % kLanes;
  Source sources[kTogether][kEights];
  u32 rows[kTogether], own_blocks[kTogether];
  bool exist[kTogether];
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    const u32 own = blockIdx.x * TC_TILE_M + (i * TC_THREADS + threadIdx.x) / kLanes;
    rows[i] = own / blocks;
    own_blocks[i] = own - rows[i] * blocks;
    exist[i] = own < total;
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const int column = own_blocks[i] * kBlockColumns + (j * kLanes + lane) * kEight;
      sources[i][j].load<kVectors>(p, rows[i], column, exist[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    float x[kEights][kEight], largest = 0.0f;
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      sources[i][j].values(x[j]);
      largest = largest_of(x[j], largest);
    }
    const float scale = scale_of(largest_of_lanes<kLanes>(largest), p.flags);
    if (!exist[i]) continue;
    const float inverse = __frcp_rn(scale);
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const int column = own_blocks[i] * kBlockColumns + (j * kLanes + lane) * kEight;
      store(p, rows[i], column, x[j], inverse);
    }
    if (lane == 0) {
      p.scales[rows[i] * p.scale_stride + own_blocks[i] * p.scale_stride_k] = scale;
    }
  }
}

template <bool kVectors>
TC_DEVICE void quantize_row(const QuantizeParams& p) {
  __shared__ float maxima[TC_THREADS / 32];
  const tc_int64 row = blockIdx.x;
  constexpr int kStep = TC_THREADS * kEight;
  const int first = threadIdx.x * kEight, rest = first + kKept * kStep;
  Source kept[kKept];
  float x[kEight], largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kKept; ++i) kept[i].load<kVectors>(p, row, first + i * kStep);
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    kept[i].values(x);
    largest = largest_of(x, largest);
  }
  for (int column = rest; column < p.columns; column += kStep) {
    Source own;
    own.load<kVectors>(p, row, column);
    own.values(x);
    largest = largest_of(x, largest);
  }
  const float scale = scale_of(largest_of_block(largest, maxima), p.flags);
  const float inverse = __frcp_rn(scale);
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    kept[i].values(x);
    store(p, row, first + i * kStep, x, inverse);
  }
  for (int column = rest; column < p.columns; column += kStep) {
    Source own;
    own.load<kVectors>(p, row, column);
    own.values(x);
    store(p, row, column, x, inverse);
  }
  if (threadIdx.x == 0) p.scales[row * p.scale_stride] = scale;
}

template <bool kVectors>
TC_DEVICE void run(const QuantizeParams& p) {
  if constexpr (kMode == kRow) {
    quantize_row<kVectors>(p);
  } else {
    quantize_blocks<kVectors>(p);
  }
}

extern "C" __global__ void __launch_bounds__(TC_THREADS)
    TC_KERNEL(const __grid_constant__ QuantizeParams p) {
  wait_for_previous_kernel();
  if (p.flags & kQuantizeVectors) {
    run<true>(p);
  } else {
    run<false>(p);
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
