// Quantises rows to 8-bit floats, with a scale for each 128 columns or for a row; bound by memory.
// quantize_params.h defines the result.
//
// Roles: of `block` and `gated` kernels 8 lanes have 128 columns, twice 8 each, and a thread loads
// kTogether such blocks before it uses them. Of `row` kernels some neighbouring threads have a row,
// by its length; a thread keeps its first kKept times 8 elements, and reads others, of rows that
// are longer than a block of threads keeps, twice, the second time from a cache.
#include "numbers.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr DType kType = DType::TC_DTYPE;
enum Mode { kBlock, kGated, kRow };
constexpr Mode kMode = Mode::TC_MODE;
constexpr int kLanes = 8, kBlockColumns = 128, kTogether = kMode == kGated ? 1 : 2;
constexpr int kEights = kBlockColumns / (kLanes * kEight);  // of a thread in a block
constexpr int kKept = kQuantizeKept / kEight;
// The quantised elements are as x stores them, or gated ones.
constexpr DType kValues = kMode == kGated ? DType::float32 : kType;
// Blocks of a multiprocessor: ptxas took 56 registers for gates, 2% slower (H200, 16384 x 7168).
constexpr int kResident = kMode != kGated ? 1 : kType == DType::float32 ? 5 : 6;
static_assert(TC_THREADS == kQuantizeThreads);
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

  TC_DEVICE Eight<kValues> values() const {
    Eight<kValues> out;
    if constexpr (kMode == kGated) {
      float gates[kEight], ups[kEight];
      x.unpack(gates), up.unpack(ups);
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        out.words[i] = __float_as_uint(gated_by_silu(gates[i], ups[i]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < x.kWords; ++i) out.words[i] = x.words[i];
    }
    out.drop_infinities();
    return out;
  }
};

// Stores eight results. Rows that are read by vectors are written by vectors.
template <bool kVectors, bool kE5m2>
TC_DEVICE void store(const QuantizeParams& p, tc_int64 row, int column, const Eight<kValues>& x,
                     float inverse) {
  float inverses[kEight];
#pragma unroll
  for (float& own : inverses) own = inverse;
  const bool e5m2 = kVectors ? kE5m2 : p.flags & kQuantizeE5m2;
  store_eight(p.data + row * p.data_stride + column, quantized(x, inverses, e5m2),
              p.columns - column, kVectors || p.flags & kQuantizeOutVectors);
}

template <bool kVectors, bool kE5m2>
TC_DEVICE void quantize_blocks(const QuantizeParams& p) {
  const u32 blocks = (p.columns + kBlockColumns - 1) / kBlockColumns;  // of a row
  const int lane = threadIdx.x % kLanes;
  const u32 first = blockIdx.x * TC_TILE_M + threadIdx.x / kLanes * kTogether;
  u32 row = first / blocks, own = first - row * blocks;
  Source sources[kTogether][kEights];
  u32 rows[kTogether], own_blocks[kTogether];
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    rows[i] = row, own_blocks[i] = own;
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const int column = own * kBlockColumns + (j * kLanes + lane) * kEight;
      sources[i][j].load<kVectors>(p, row, column, row < p.rows);
    }
    if (++own == blocks) own = 0, ++row;
  }
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    Eight<kValues> x[kEights], most;
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      x[j] = sources[i][j].values();
      most.keep_larger(x[j]);
    }
    const float scale = scale_of(largest_of_lanes<kLanes>(most.largest()), p.flags);
    if (rows[i] >= p.rows) continue;
    const float inverse = __frcp_rn(scale);
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const int column = own_blocks[i] * kBlockColumns + (j * kLanes + lane) * kEight;
      store<kVectors, kE5m2>(p, rows[i], column, x[j], inverse);
    }
    if (lane == 0) {
      p.scales[rows[i] * p.scale_stride + own_blocks[i] * p.scale_stride_k] = scale;
    }
  }
}

// The largest of a number over the threads of a row; `shared` has a float for each warp.
TC_DEVICE float largest_of_row(const QuantizeParams& p, float most, float* shared) {
  const int lanes = 1 << p.row_threads_log2;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    if (step < lanes) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  }
  if (lanes <= 32) return most;
  const int warp = threadIdx.x / 32, others = lanes / 32 - 1;
  if (threadIdx.x % 32 == 0) shared[warp] = most;
  __syncthreads();
  return largest_of_lanes<8>(shared[(warp & ~others) | (threadIdx.x & others)]);
}

template <bool kVectors, bool kE5m2>
TC_DEVICE void quantize_rows(const QuantizeParams& p) {
  __shared__ float maxima[TC_THREADS / 32];
  const tc_int64 row = (blockIdx.x * tc_int64{TC_THREADS} + threadIdx.x) >> p.row_threads_log2;
  const bool exists = row < p.rows;
  const int step = kEight << p.row_threads_log2,
            lane = threadIdx.x & ((1 << p.row_threads_log2) - 1);
  const int first = lane * kEight, rest = first + kKept * step;
  Source kept[kKept], own;
  Eight<kValues> x[kKept], most;
#pragma unroll
  for (int i = 0; i < kKept; ++i) kept[i].load<kVectors>(p, row, first + i * step, exists);
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    x[i] = kept[i].values();
    most.keep_larger(x[i]);
  }
  for (int column = rest; column < p.columns; column += step) {
    own.load<kVectors>(p, row, column, exists);
    most.keep_larger(own.values());
  }
  const float scale = scale_of(largest_of_row(p, most.largest(), maxima), p.flags);
  if (!exists) return;
  const float inverse = __frcp_rn(scale);
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    if (i * step >= p.columns) break;
    store<kVectors, kE5m2>(p, row, first + i * step, x[i], inverse);
  }
  for (int column = rest; column < p.columns; column += step) {
    own.load<kVectors>(p, row, column);
    store<kVectors, kE5m2>(p, row, column, own.values(), inverse);
  }
  if (lane == 0) p.scales[row * p.scale_stride] = scale;
}

template <bool kVectors, bool kE5m2>
TC_DEVICE void run(const QuantizeParams& p) {
  if constexpr (kMode == kRow) {
    quantize_rows<kVectors, kE5m2>(p);
  } else {
    quantize_blocks<kVectors, kE5m2>(p);
  }
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, kResident)
    TC_KERNEL(const __grid_constant__ QuantizeParams p) {
  wait_for_previous_kernel();
  if (!(p.flags & kQuantizeVectors)) {
    run<false, false>(p);
  } else if (p.flags & kQuantizeE5m2) {
    run<true, true>(p);
  } else {
    run<true, false>(p);
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
