// Combines the partial results of an attention forward whose columns were split, in the splits'
// order, so that the same inputs give the same bits. Sinks are added here, since each counts once a
// row.
//
// warps_per_row warps share a row: grid.x = ceil(batch * heads * seqlen_q / rows of a block),
// grid.y = ceil(head_dim_v / 128).
#include "combine_params.h"
#include "epilogue.cuh"

namespace torch_cubin::TC_KERNEL {

struct Config {
  static constexpr DType kDType = DType::TC_DTYPE;
  static constexpr int kThreads = TC_THREADS;
};

constexpr DType kDType = Config::kDType;
using Storage = DTypeTraits<kDType>::Storage;
constexpr int kWarps = Config::kThreads / 32;

TC_DEVICE float warp_max(float x) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, bit));
  return x;
}

TC_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) x += __shfl_xor_sync(~0u, x, bit);
  return x;
}

template <DType kType, class To>
TC_DEVICE void store4(To* to, float4 x) {
  using Traits = DTypeTraits<kType>;
  if constexpr (kType == DType::float32) {
    *reinterpret_cast<float4*>(to) = x;
  } else {
    *reinterpret_cast<uint2*>(to) = make_uint2(Traits::pack(x.x, x.y), Traits::pack(x.z, x.w));
  }
}

// Four columns a lane of one row, of several parts, all requested before the first is used.
struct PartRows {
  float4 x[kPartsTogether];

  TC_DEVICE void load(const float* from, tc_int64 stride, int first, int step, int parts) {
#pragma unroll
    for (int i = 0; i < kPartsTogether; ++i) {
      int part = first + i * step;
      if (part < parts) x[i] = *reinterpret_cast<const float4*>(from + part * stride);
    }
  }
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, 3)
    TC_KERNEL(const __grid_constant__ CombineParams p) {
  launch_next_grid();  // its blocks start, and prefetch, while the parts are still being computed
  __shared__ float4 sums[kWarps][32];
  __shared__ float weights[kWarps][kMostCombinedParts];
  int of_row = p.warps_per_row, lane = threadIdx.x % 32;
  int slot = threadIdx.x / 32 / of_row, warp = threadIdx.x / 32 - slot * of_row;
  tc_int64 rows = static_cast<tc_int64>(p.batch) * p.heads * p.seqlen_q;
  tc_int64 index = static_cast<tc_int64>(blockIdx.x) * (kWarps / of_row) + slot;
  bool exists = index < rows;
  if (!exists) index = 0;
  u32 head_index = static_cast<u32>(index / p.seqlen_q);
  int row = static_cast<int>(index - static_cast<tc_int64>(head_index) * p.seqlen_q);
  int batch = head_index / p.heads;
  int column = blockIdx.y * kCombinedColumns + 4 * lane;
  bool has_column = column < p.head_dim_v;
  const float* from = p.partial_out + index * p.head_dim_v + (has_column ? column : 0);
  const tc_int64 stride = rows * p.head_dim_v;
  wait_for_previous_grid();

  float weight[kMostCombinedParts / 32];  // of part 32 * i + lane
#pragma unroll
  for (int i = 0; i < kMostCombinedParts / 32; ++i) {
    int part = 32 * i + lane;
    weight[i] = part < p.splits ? p.partial_logsumexp[part * rows + index] : -kInfinity;
  }
  PartRows part_rows;
  part_rows.load(from, stride, warp, of_row, p.splits);

  Sequence s(p, batch, head_index - batch * p.heads);
  exists &= row < s.rows;
  float maximum = p.sinks != nullptr ? p.sinks[s.head] : -kInfinity;
  int used = 0;  // parts; those after them are empty and may be uninitialised
#pragma unroll
  for (int i = 0; i < kMostCombinedParts / 32; ++i) {
    if (weight[i] != -kInfinity) used = 32 * i + lane + 1;
    maximum = fmaxf(maximum, weight[i]);
  }
  int parts = __reduce_max_sync(~0u, used);
  maximum = fmaxf(warp_max(maximum), kLowest);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kMostCombinedParts / 32; ++i) {
    weight[i] = exp2_approx((weight[i] - maximum) * kLog2e);
    sum += weight[i];
  }
  sum = warp_sum(sum);
  if (p.sinks != nullptr) sum += exp2_approx((p.sinks[s.head] - maximum) * kLog2e);
  if (exists && threadIdx.x % (32 * of_row) == 0 && blockIdx.y == 0 && p.logsumexp != nullptr) {
    p.logsumexp[s.row_index(p, row)] = sum == 0.0f ? -kInfinity : maximum + logf(sum);
  }
  float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
  for (int i = 0; i < kMostCombinedParts / 32; ++i) {
    weights[threadIdx.x / 32][32 * i + lane] = weight[i] * factor;
  }
  __syncwarp();

  float4 joined = {};
  for (int first = warp; first < parts; first += kPartsTogether * of_row) {
    if (first > warp) part_rows.load(from, stride, first, of_row, parts);
#pragma unroll
    for (int i = 0; i < kPartsTogether; ++i) {
      int part = first + i * of_row;
      if (part >= parts) break;
      float of_part = weights[threadIdx.x / 32][part];
      joined.x += of_part * part_rows.x[i].x;
      joined.y += of_part * part_rows.x[i].y;
      joined.z += of_part * part_rows.x[i].z;
      joined.w += of_part * part_rows.x[i].w;
    }
  }
  if (of_row > 1) {
    sums[threadIdx.x / 32][lane] = joined;
    __syncthreads();
    if (warp > 0) return;
    for (int w = 1; w < of_row; ++w) {
      float4 x = sums[slot * of_row + w][lane];
      joined.x += x.x;
      joined.y += x.y;
      joined.z += x.z;
      joined.w += x.w;
    }
  }
  if (exists && has_column) {
    store4<kDType>(static_cast<Storage*>(p.out) + s.q_offset(p, p.out_stride, row) + column,
                   joined);
  }
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"kernels": [
  {"name": "combine_attention_{d.short}", "kind": "combine", "layout": "any", "alignment": 16,
   "for": {"d": [{"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"},
                 {"short": "f32", "dtype": "float32"}]},
   "dtype": "{d.dtype}", "math": "{d.dtype}", "tile": [8, 1, 1], "stages": 1, "block": [256, 1, 1],
   "dynamic_shared": 0, "defines": {"TC_DTYPE": "{d.dtype}"}, "cost": {"k_tile": 8700, "fixed": 1200}}]}
*/
