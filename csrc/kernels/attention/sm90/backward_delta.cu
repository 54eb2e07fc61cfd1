// Row sums for attention's backward on Hopper (sm90/backward.cu):
//
//   logsumexp (times logsumexp_unit), and delta = sum over the columns of grad_out * out
//
// in tiles of tile_rows queries. Those past the end have weights of 0, since the other kernel
// copies whole tiles to shared memory; so do queries that attend to no key. It also sets the tiles'
// turns, and the blocks' counter, to 0, and numbers the steps that a mask leaves.
//
// Eight lanes a row, so that they read 128 contiguous bytes; a block has a tile, and a thread
// requests several of its rows at once.
#include "attention/numbers.cuh"
#include "backward_dq.cuh"
#include "common/dtype.cuh"

namespace torch_cubin::TC_KERNEL {

struct Config {
  static constexpr DType kDType = DType::TC_DTYPE;
  static constexpr int kRows = TC_TILE_M, kThreads = TC_THREADS;  // kRows: the most of a tile
};

using namespace sm90;
using Traits = DTypeTraits<Config::kDType>;
constexpr int kLanes = 8, kRowsAtOnce = Config::kThreads / kLanes;
constexpr int kTogether = 3;  // rows that a thread requests at once
static_assert(Config::kRows <= Config::kThreads);

// The sum of 8 products.
TC_DEVICE float dot(uint4 a, uint4 b, float sum) {
  u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = fmaf(Traits::load(static_cast<u16>(x[i])), Traits::load(static_cast<u16>(y[i])), sum);
    sum = fmaf(Traits::load(static_cast<u16>(x[i] >> 16)),
               Traits::load(static_cast<u16>(y[i] >> 16)), sum);
  }
  return sum;
}

// The rank of each block of keys in the order of additions to a tile of queries: for each tile of a
// mask, in a warp of one of the blocks in the middle of the grid, while others read.
TC_DEVICE void rank_steps(const Sm90BackwardParams& p) {
  u32 tiles = static_cast<u32>(p.bits.tiles), count = tiles * p.bits.batches * p.bits.heads;
  u32 index = blockIdx.x - (gridDim.x - count) / 2, lane = threadIdx.x % 32;
  if (threadIdx.x >= 32 || index >= count) return;
  u32* row =
      p.bits.steps + static_cast<tc_int64>(index / tiles) * p.key_tiles * tiles + index % tiles;
  int before = 0;
#pragma unroll 1
  for (int first = 0; first < p.key_tiles; first += 32) {
    int key_tile = first + static_cast<int>(lane);
    u32* at = row + static_cast<tc_int64>(key_tile) * tiles;
    u32 step = key_tile < p.key_tiles ? *at : static_cast<u32>(kStepHidesAll);
    u32 seen = __ballot_sync(~0u, step < kStepHidesAll);
    if (key_tile < p.key_tiles) {
      *at = step | static_cast<u32>(before + __popc(seen & ((1u << lane) - 1))) << kStepClassBits;
    }
    before += __popc(seen);
  }
}

struct Row {
  const u16* out;
  const u16* grad;
  bool exists;
};

// Stores delta for kTogether rows.
TC_DEVICE void add_rows(const Row (&row)[kTogether], int width, int lane, float* delta) {
  float sum[kTogether] = {};
#pragma unroll 1
  for (int column = 8 * lane; column < width; column += 8 * kLanes) {
    uint4 out[kTogether] = {}, grad[kTogether] = {};
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (!row[i].exists) continue;
      out[i] = __ldg(reinterpret_cast<const uint4*>(row[i].out + column));
      grad[i] = __ldg(reinterpret_cast<const uint4*>(row[i].grad + column));
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) sum[i] = dot(out[i], grad[i], sum[i]);
  }
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      sum[i] += __shfl_xor_sync(~0u, sum[i], step);
    }
    if (lane == 0) delta[i * kRowsAtOnce] = sum[i];
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, 8)
    TC_KERNEL(const __grid_constant__ Sm90BackwardParams p) {
  constexpr int kPass = kTogether * kRowsAtOnce;
  __shared__ float delta[(Config::kRows + kPass - 1) / kPass * kPass];
  wait_for_previous_kernel();
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.ticket = 0;
  if (p.bits.steps != nullptr) rank_steps(p);
  u32 index = blockIdx.x;
  int wrong_offsets = wrong_offsets_of(p);
  QueryTile tile(p, index);
  Sm90Sequence sequence(p.lengths, tile.batch);
  int first = tile.tile * p.tile_rows, rows = min(sequence.rows - first, p.tile_rows);
  if (wrong_offsets != 0 || tile.tile < 0 || rows <= 0) return;
  if (threadIdx.x == 0) {
    for (int set = 0; set < p.sets; ++set) {
      p.turns[static_cast<tc_int64>(set) * p.query_tiles + index] = 0;
    }
  }
  int own = threadIdx.x, lane = own % kLanes;
  tc_int64 place = sequence.q_row + first;
  float logsumexp = kInfinity;
  if (own < rows) {
    logsumexp = p.logsumexp[tile.batch * p.logsumexp_stride[0] + tile.head * p.logsumexp_stride[1] +
                            place + own];
  }
  auto out = static_cast<const u16*>(p.out) + tile.batch * p.out_stride[0] +
             tile.head * p.out_stride[1] + place * p.out_stride[2];
  auto grad = static_cast<const u16*>(p.grad_out_rows) + tile.batch * p.grad_out_stride[0] +
              tile.head * p.grad_out_stride[1] + place * p.grad_out_stride[2];
#pragma unroll 1
  for (int from = own / kLanes; from < p.tile_rows; from += kPass) {
    Row row[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      int of = from + i * kRowsAtOnce;
      row[i] = {out + of * p.out_stride[2], grad + of * p.grad_out_stride[2], of < rows};
    }
    add_rows(row, p.head_dim_v, lane, delta + from);
  }
  __syncthreads();
  if (own >= p.tile_rows) return;
  float* to = p.sums + static_cast<tc_int64>(index) * (2 * p.tile_rows) + own;
  to[0] = logsumexp == -kInfinity ? kInfinity : logsumexp * p.logsumexp_unit;
  to[p.tile_rows] = delta[own];
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sm90_backward_delta_attention_{d.short}", "kind": "delta", "tile": [96, 1, 1],
   "block": [128, 1, 1], "cost": {"k_tile": 0, "fixed": 0}, "defines": {"TC_DTYPE": "{d.dtype}"},
   "for": {"d": "f16 bf16"}}]}
*/
