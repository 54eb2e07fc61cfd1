// Joins the partial results of an attention forward whose columns were split: in the splits' order,
// so that the same inputs give the same bits. Sinks join here, since each counts once a row.
//
// A block's warps share its rows, warps_per_row of them each: grid.x = ceil(batch * heads * seqlen_q /
// rows of a block).
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
constexpr int kColumns = 256;  // of a pass

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

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    TC_KERNEL(const __grid_constant__ CombineParams p) {
  wait_for_previous_kernel();
  __shared__ float4 sums[kWarps][2][32];
  int of_row = p.warps_per_row, lane = threadIdx.x % 32;
  int slot = threadIdx.x / 32 / of_row, warp = threadIdx.x / 32 - slot * of_row;
  tc_int64 rows = static_cast<tc_int64>(p.batch) * p.heads * p.seqlen_q;
  tc_int64 index = static_cast<tc_int64>(blockIdx.x) * (kWarps / of_row) + slot;
  bool exists = index < rows;
  if (!exists) index = 0;
  u32 head_index = static_cast<u32>(index / p.seqlen_q);
  int row = static_cast<int>(index - static_cast<tc_int64>(head_index) * p.seqlen_q);
  int batch = head_index / p.heads;
  Sequence s(p, batch, head_index - batch * p.heads);
  exists &= row < s.rows;
  int splits = exists ? p.splits : 0;

  const float* logsumexps = p.partial_logsumexp + index;
  float maximum = p.sinks != nullptr ? p.sinks[s.head] : -kInfinity;
  int used = 0;  // splits: those behind saw nothing, and may have written nothing else
  for (int split = lane; split < splits; split += 32) {
    float logsumexp = logsumexps[split * rows];
    if (logsumexp != -kInfinity) used = split + 1;
    maximum = fmaxf(maximum, logsumexp);
  }
  splits = __reduce_max_sync(~0u, used);
  maximum = fmaxf(warp_max(maximum), kLowest);
  float sum = 0.0f;
  for (int split = lane; split < splits; split += 32) {
    sum += exp2_approx((logsumexps[split * rows] - maximum) * kLog2e);
  }
  sum = warp_sum(sum);
  if (p.sinks != nullptr) sum += exp2_approx((p.sinks[s.head] - maximum) * kLog2e);
  if (exists && lane == 0 && warp == 0 && p.logsumexp != nullptr) {
    p.logsumexp[s.row_index(p, row)] = sum == 0.0f ? -kInfinity : maximum + logf(sum);
  }

  float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
  auto out = static_cast<Storage*>(p.out) + s.q_offset(p, p.out_stride, exists ? row : 0);
  for (int first = 0; first < p.head_dim_v; first += kColumns) {
    float4 joined[2] = {};
    const float* part = p.partial_out + index * p.head_dim_v + first;
#pragma unroll 4
    for (int split = warp; split < splits; split += of_row) {
      float weight = exp2_approx((logsumexps[split * rows] - maximum) * kLog2e) * factor;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int column = 128 * half + 4 * lane;
        if (first + column < p.head_dim_v) {
          float4 x = *reinterpret_cast<const float4*>(part + split * rows * p.head_dim_v + column);
          joined[half].x += weight * x.x;
          joined[half].y += weight * x.y;
          joined[half].z += weight * x.z;
          joined[half].w += weight * x.w;
        }
      }
    }
    if (of_row > 1) {
      sums[threadIdx.x / 32][0][lane] = joined[0];
      sums[threadIdx.x / 32][1][lane] = joined[1];
      __syncthreads();
    }
    for (int half = warp; half < 2; half += of_row) {
      float4 total = half == 0 ? joined[0] : joined[1];
      if (of_row > 1) total = sums[slot * of_row][half][lane];
      for (int w = 1; w < of_row; ++w) {
        float4 x = sums[slot * of_row + w][half][lane];
        total.x += x.x;
        total.y += x.y;
        total.z += x.z;
        total.w += x.w;
      }
      int column = first + 128 * half + 4 * lane;
      if (exists && column < p.head_dim_v) store4<kDType>(out + column, total);
    }
    __syncthreads();
  }
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"kernels": [
  {"name": "combine_attention_{d.short}", "kind": "combine", "layout": "any", "alignment": 16,
   "for": {"d": [{"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"},
                 {"short": "f32", "dtype": "float32"}]},
   "dtype": "{d.dtype}", "math": "{d.dtype}", "tile": [8, 1, 1], "stages": 1, "block": [256, 1, 1],
   "dynamic_shared": 0, "defines": {"TC_DTYPE": "{d.dtype}"}, "cost": {"k_tile": 0, "fixed": 2000}}]}
*/
