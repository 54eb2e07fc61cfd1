// Row sums for attention's backward pass:
//
//   delta[b, h, row] = sum over the columns of grad_out * out
//
// or, with kAttendSinkTerms, the row's term of the gradient of its head's sink:
//
//   delta[b, h, row] =
//       -exp(sinks[h] - logsumexp[b, h, row]) * sum over the columns of grad_out * out
//
// Eight lanes a row, so that they read 128 contiguous bytes. A block has kTileM rows of one (batch,
// head); rows past the end of a packed sequence do nothing. It also sets the backward kernel's
// turns to 0, if there are any.
#include "backward_dq.cuh"

namespace torch_cubin::TC_KERNEL {

struct Config {
  static constexpr DType kDType = DType::TC_DTYPE;
  static constexpr int kTileM = TC_TILE_M, kThreads = TC_THREADS;
};

constexpr DType kDType = Config::kDType;
using Traits = DTypeTraits<kDType>;
using Storage = Traits::Storage;
constexpr int kLanes = 8;
constexpr int kPerVector = 16 / sizeof(Storage);
static_assert(Config::kTileM * kLanes == Config::kThreads, "eight lanes a row");
static_assert(Config::kTileM == kTurnRows, "a block has one turn");

struct Vector {
  Storage value[kPerVector];
};

TC_DEVICE Vector load(const Storage* at) {
  uint4 bits = __ldg(reinterpret_cast<const uint4*>(at));
  Vector out;
  static_assert(sizeof(out) == sizeof(bits), "16 bytes");
  memcpy(&out, &bits, sizeof(out));
  return out;
}

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    TC_KERNEL(const __grid_constant__ AttentionParams p) {
  wait_for_previous_kernel();
  u32 tiles = static_cast<u32>(p.seqlen_q + Config::kTileM - 1) / Config::kTileM;
  u32 pair = blockIdx.x / tiles;
  Sequence s(p, static_cast<int>(pair / p.heads), static_cast<int>(pair % p.heads));
  if (threadIdx.x == 0 && p.dq_turn != nullptr) p.dq_turn[blockIdx.x] = 0;
  int row = static_cast<int>(blockIdx.x % tiles) * Config::kTileM + threadIdx.x / kLanes;
  if (row >= s.rows) return;
  auto out = static_cast<const Storage*>(p.out) + s.q_offset(p, p.out_stride, row);
  auto grad = static_cast<const Storage*>(p.grad_out) + s.q_offset(p, p.grad_out_stride, row);
  int lane = threadIdx.x % kLanes;
  float sum = 0.0f;
#pragma unroll 4
  for (int column = lane * kPerVector; column < p.head_dim_v; column += kLanes * kPerVector) {
    Vector a = load(out + column), b = load(grad + column);
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) {
      sum = fmaf(Traits::load(a.value[i]), Traits::load(b.value[i]), sum);
    }
  }
  // The rows may end within a warp: only the lanes of this row take part.
  u32 mask = 0xFFu << (threadIdx.x % 32 / kLanes * kLanes);
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(mask, sum, step);
  if (lane != 0) return;
  tc_int64 at = s.row_index(p, row);
  if (p.flags & kAttendSinkTerms) {
    float logsumexp = p.logsumexp[at];
    // A row without any weight contributes nothing, whatever its gradient holds.
    sum = logsumexp == -kInfinity ? 0.0f : -expf(p.sinks[s.head] - logsumexp) * sum;
  }
  const_cast<float*>(p.delta)[at] = sum;
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"kernels": [
  {"name": "delta_attention_{d.short}", "kind": "delta", "tile": [32, 1, 1], "block": [256, 1, 1],
   "cost": {"k_tile": 0, "fixed": 0}, "defines": {"TC_DTYPE": "{d.dtype}"},
   "for": {"d": "f16 bf16 f32"}}]}
*/
