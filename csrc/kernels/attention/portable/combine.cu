// Combines the partial results of an attention forward whose columns were split, in the splits'
// order, so that the same inputs give the same bits. Sinks are added here, since each counts once a
// row.
//
// warps_per_row warps share a row: grid.x = ceil(batch * heads * seqlen_q / rows of a block),
// grid.y = ceil(head_dim_v / 128).
#include "combine_params.h"
#include "epilogue.cuh"
#include "equal_sequence.cuh"

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

// Keeps the compiler from computing values later than here.
template <class... T>
TC_DEVICE void compute_here(T&... values) {
  auto one = [](auto& x) {
    if constexpr (sizeof(x) == 8) {
      asm volatile("" : "+l"(x));
    } else {
      asm volatile("" : "+r"(x));
    }
  };
  (one(values), ...);
}

// Four columns a lane of one row, of several parts, all requested before the first is used.
struct PartRows {
  float4 x[kPartsTogether];

  TC_DEVICE void load(const float* from, tc_int64 step, int parts) {
#pragma unroll
    for (int i = 0; i < kPartsTogether; ++i) {
      if (i < parts) x[i] = *reinterpret_cast<const float4*>(from);
      from += step;
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
  const tc_int64 stride = rows * p.head_dim_v;
  tc_int64 step = of_row * stride;
  tc_int64 from = index * p.head_dim_v + (has_column ? column : 0) + warp * stride;
  tc_int64 of_part = lane * rows + index;
  Sequence s = equal_sequence(p, batch, head_index - batch * p.heads);
  int left = (p.splits - warp + of_row - 1) / of_row;  // parts of this warp
  tc_int64 to = s.q_offset(p, p.out_stride, row) + column;
  compute_here(from, of_part, to, step, left, s.batch, s.head, s.rows, row);

  float weight[kMostCombinedParts / 32];  // of part 32 * i + lane
  // A loop that never repeats: ptxas would move addresses from before the wait to behind it, and
  // the load of these weights behind the others.
#pragma unroll 1
  do {
    wait_for_previous_grid();
    weight[0] = lane < p.splits ? p.partial_logsumexp[of_part] : -kInfinity;
    asm volatile("" : "+f"(weight[0]));
  } while (of_row == 0);
  PartRows part_rows;
  part_rows.load(p.partial_out + from, step, left);
  float sink = p.sinks != nullptr ? p.sinks[s.head] : -kInfinity;
  if (p.splits > 32) {
#pragma unroll
    for (int i = 1; i < kMostCombinedParts / 32; ++i) {
      bool has = 32 * i + lane < p.splits;
      weight[i] = has ? p.partial_logsumexp[of_part + 32 * i * rows] : -kInfinity;
    }
  }
  if (!has_equal_lengths(p)) {
    s = Sequence(p, batch, s.head);
    to = s.q_offset(p, p.out_stride, row) + column;
  }
  exists &= row < s.rows;
  float maximum = sink;
  int used = 0;  // parts; those after them are empty and may be uninitialised
#pragma unroll
  for (int i = 0; i < kMostCombinedParts / 32; ++i) {
    if (i > 0 && p.splits <= 32 * i) break;
    if (weight[i] != -kInfinity) used = 32 * i + lane + 1;
    maximum = fmaxf(maximum, weight[i]);
  }
  int parts = __reduce_max_sync(~0u, used);
  maximum = fmaxf(warp_max(maximum), kLowest);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kMostCombinedParts / 32; ++i) {
    if (i > 0 && p.splits <= 32 * i) break;
    weight[i] = exp2_approx((weight[i] - maximum) * kLog2e);
    sum += weight[i];
  }
  sum = warp_sum(sum);
  if (p.sinks != nullptr) sum += exp2_approx((sink - maximum) * kLog2e);
  float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
  for (int i = 0; i < kMostCombinedParts / 32; ++i) {
    if (i > 0 && p.splits <= 32 * i) break;
    weights[threadIdx.x / 32][32 * i + lane] = weight[i] * factor;
  }
  __syncwarp();

  float4 joined = {};
  for (int first = warp; first < parts; first += kPartsTogether * of_row) {
    if (first > warp) {
      left -= kPartsTogether;
      from += kPartsTogether * step;
      part_rows.load(p.partial_out + from, step, left);
    }
    float of_first[kPartsTogether];
#pragma unroll
    for (int i = 0; i < kPartsTogether; ++i) {
      of_first[i] = weights[threadIdx.x / 32][min(first + i * of_row, kMostCombinedParts - 1)];
    }
#pragma unroll
    for (int i = 0; i < kPartsTogether; ++i) {
      if (first + i * of_row < parts) {
        joined.x += of_first[i] * part_rows.x[i].x;
        joined.y += of_first[i] * part_rows.x[i].y;
        joined.z += of_first[i] * part_rows.x[i].z;
        joined.w += of_first[i] * part_rows.x[i].w;
      }
    }
  }
  if (of_row > 1) {
    sums[threadIdx.x / 32][lane] = joined;
    __syncthreads();
    if (warp > 0) return;
    float4 others[kWarps];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      if (w < of_row) others[w] = sums[slot * of_row + w][lane];
    }
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      if (w < of_row) {
        joined.x += others[w].x;
        joined.y += others[w].y;
        joined.z += others[w].z;
        joined.w += others[w].w;
      }
    }
  }
  if (exists && has_column) {
    store4<kDType>(static_cast<Storage*>(p.out) + to, joined);
  }
  if (exists && threadIdx.x % (32 * of_row) == 0 && blockIdx.y == 0 && p.logsumexp != nullptr) {
    p.logsumexp[s.row_index(p, row)] = sum == 0.0f ? -kInfinity : maximum + logf(sum);
  }
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"kernels": [
  {"name": "combine_attention_{d.short}", "kind": "combine", "tile": [8, 1, 1],
   "block": [256, 1, 1], "cost": {"k_tile": 8700, "fixed": 1200},
   "defines": {"TC_DTYPE": "{d.dtype}"}, "for": {"d": "f16 bf16 f32"}}]}
*/
