// The end of attention's backward pass: dq = scale * dq_sum, rounded, reordered from the backward
// kernel's order (backward_dq.cuh) to dq's strides.
//
// A warp has 16 rows and processes their columns 32 at a time: a transposition within each quad
// gives every lane 8 adjacent columns of two rows. Rows that attend to no key get zeros, since
// their sums were never written. kTileM = 16 rows a warp, of all batch * heads * ceil(seqlen_q /
// 16) tiles.
#include "attention/quad.cuh"
#include "backward_dq.cuh"

namespace torch_cubin::TC_KERNEL {

struct Config {
  static constexpr DType kDType = DType::TC_DTYPE;
  static constexpr int kThreads = TC_THREADS;
};

constexpr DType kDType = Config::kDType;
using Storage = DTypeTraits<kDType>::Storage;
constexpr int kWarps = Config::kThreads / 32;

// This lane's four elements of a tile.
TC_DEVICE void load_tile(float (&out)[4], const float* at) {
  if constexpr (kDqElementStep == 1) {
    float4 all = __ldcs(reinterpret_cast<const float4*>(at));
    out[0] = all.x, out[1] = all.y, out[2] = all.z, out[3] = all.w;
  } else {
#pragma unroll
    for (int r = 0; r < 4; ++r) out[r] = __ldcs(at + kDqElementStep * r);
  }
}

// Stores 8 adjacent columns of a row: of the quad's four tiles, lane t gets tile t.
template <DType kType>
TC_DEVICE void store_row(typename DTypeTraits<kType>::Storage* at, bool exists,
                         const float (&low)[4], const float (&high)[4]) {
  if constexpr (sizeof(*at) == 2) {
    u32 words[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) words[n] = DTypeTraits<kType>::pack(low[n], high[n]);
    quad_transpose(words);
    if (exists) *reinterpret_cast<uint4*>(at) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    u32 a[4], b[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      a[n] = __float_as_uint(low[n]);
      b[n] = __float_as_uint(high[n]);
    }
    quad_transpose(a);
    quad_transpose(b);
    if (exists) {
      reinterpret_cast<uint4*>(at)[0] = make_uint4(a[0], b[0], a[1], b[1]);
      reinterpret_cast<uint4*>(at)[1] = make_uint4(a[2], b[2], a[3], b[3]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    TC_KERNEL(const __grid_constant__ AttentionParams p) {
  wait_for_previous_kernel();
  u32 tiles = static_cast<u32>(p.seqlen_q + 15) / 16;
  u32 index = blockIdx.x * kWarps + threadIdx.x / 32;
  u32 pair = index / tiles;
  int tile = static_cast<int>(index % tiles);
  if (pair >= static_cast<u32>(p.batch) * static_cast<u32>(p.heads)) return;
  Sequence s(p, static_cast<int>(pair / p.heads), static_cast<int>(pair % p.heads));
  if (tile * 16 >= s.rows) return;
  int first_seen = max(tile * 16, -s.last),
      last_seen = min(tile * 16 + 15, s.columns - 1 - s.first);
  bool sees = s.columns > 0 && first_seen <= min(last_seen, s.rows - 1);
  int lane = threadIdx.x % 32, row = tile * 16 + lane / 4, mine = lane % 4 * 8;
  const float* from = p.dq_sum + dq_sum_offset(p, s, tile) + lane * kDqLaneStep;
  auto to = static_cast<Storage*>(p.dq) + s.q_offset(p, p.dq_stride, row) + mine;
#pragma unroll 2
  for (int column = 0; column < p.head_dim; column += 32) {
    float sum[4][4] = {};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (sees && column + 8 * n < p.head_dim) load_tile(sum[n], from + (column + 8 * n) * 16);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float low[4], high[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        low[n] = sum[n][2 * h] * p.scale;
        high[n] = sum[n][2 * h + 1] * p.scale;
      }
      bool exists = row + 8 * h < s.rows && column + mine < p.head_dim;
      store_row<kDType>(to + 8 * h * p.dq_stride[2] + column, exists, low, high);
    }
  }
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"kernels": [
  {"name": "convert_attention_{d.short}", "kind": "convert", "tile": [128, 1, 1],
   "block": [256, 1, 1], "cost": {"k_tile": 0, "fixed": 0}, "defines": {"TC_DTYPE": "{d.dtype}"},
   "for": {"d": "f16 bf16"}}]}
*/
