// Row sums for attention's backward on Hopper (sm90/backward.cu):
//
//   logsumexp (times logsumexp_unit), and delta = sum over the columns of grad_out * out
//
// in tiles of tile_rows queries. Those past the end have weights of 0, since the other kernel
// copies whole tiles to shared memory; so do queries that attend to no key. It also sets the tiles'
// turns, and the blocks' counter, to 0, and numbers the steps that a mask leaves.
//
// Eight lanes a row, so that they read 128 contiguous bytes; a block has kTileM rows of one tile.
#include "attention/numbers.cuh"
#include "backward_dq.cuh"
#include "common/dtype.cuh"

namespace torch_cubin::TC_KERNEL {

struct Config {
  static constexpr DType kDType = DType::TC_DTYPE;
  static constexpr int kTileM = TC_TILE_M, kThreads = TC_THREADS;
};

using namespace sm90;
using Traits = DTypeTraits<Config::kDType>;
constexpr int kLanes = 8;
static_assert(Config::kTileM * kLanes == Config::kThreads, "eight lanes a row");

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

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    TC_KERNEL(const __grid_constant__ Sm90BackwardParams p) {
  wait_for_previous_kernel();
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.ticket = 0;
  if (p.bits.steps != nullptr) rank_steps(p);
  int blocks = p.tile_rows / Config::kTileM;  // of a tile
  u32 index = blockIdx.x / blocks;
  int within = blockIdx.x % blocks * Config::kTileM + threadIdx.x / kLanes;
  int wrong_offsets = wrong_offsets_of(p);
  QueryTile tile(p, index);
  Sm90Sequence sequence(p.lengths, tile.batch);
  int row = tile.tile * p.tile_rows + within, lane = threadIdx.x % kLanes;
  if (wrong_offsets != 0 || tile.tile < 0 || tile.tile * p.tile_rows >= sequence.rows) return;
  if (threadIdx.x == 0 && within == 0) {
    for (int set = 0; set < p.sets; ++set) {
      p.turns[static_cast<tc_int64>(set) * p.query_tiles + index] = 0;
    }
  }
  float sum = 0.0f, logsumexp = kInfinity;
  if (row < sequence.rows) {
    tc_int64 at = sequence.q_row + row;
    int batch = tile.batch, head = tile.head;
    auto out = static_cast<const u16*>(p.out) + batch * p.out_stride[0] + head * p.out_stride[1] +
               at * p.out_stride[2];
    auto grad = static_cast<const u16*>(p.grad_out_rows) + batch * p.grad_out_stride[0] +
                head * p.grad_out_stride[1] + at * p.grad_out_stride[2];
#pragma unroll 2
    for (int column = 8 * lane; column < p.head_dim_v; column += 8 * kLanes) {
      sum = dot(__ldg(reinterpret_cast<const uint4*>(out + column)),
                __ldg(reinterpret_cast<const uint4*>(grad + column)), sum);
    }
    if (lane == 0) {
      logsumexp = p.logsumexp[batch * p.logsumexp_stride[0] + head * p.logsumexp_stride[1] + at];
    }
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) {
    float* to = p.sums + static_cast<tc_int64>(index) * (2 * p.tile_rows) + within;
    to[0] = logsumexp == -kInfinity ? kInfinity : logsumexp * p.logsumexp_unit;
    to[p.tile_rows] = sum;
  }
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sm90_backward_delta_attention_{d.short}", "archs": ["sm_90a"],
   "for": {"d": [{"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"}]},
   "defines": {"TC_DTYPE": "{d.dtype}"},
   "kind": "delta", "dtype": "{d.dtype}", "math": "{d.dtype}", "layout": "any",
   "alignment": 16, "tile": [16, 1, 1], "stages": 1, "block": [128, 1, 1], "dynamic_shared": 0,
   "cost": {"k_tile": 0, "fixed": 0}}]}
*/
