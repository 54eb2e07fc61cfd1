// The second kernel of a matmul that was split along K: adds the splits' partial sums, adds the
// bias, rounds and writes C. Launched with the MatmulParams of the first kernel.
//
// Any grid.x is valid: blocks process kTileN outputs at a time, round-robin. Many splits of few
// outputs (a long dot product) are distributed over the threads of a block; otherwise one thread
// adds all partial sums of its output. The choice, and every order of addition, depends on the
// sizes only: same inputs, same bits. If the number of splits is negative, one thread adds them
// however many there are, in their order: as a block that has all of K.
//
// Roles: all threads add.
#include "dot_common.cuh"

namespace torch_cubin::TC_KERNEL {

struct Config {
  static constexpr DType kDType = DType::TC_DTYPE;
  static constexpr int kTileN = TC_TILE_N, kThreads = TC_THREADS;
};

constexpr DType kDType = Config::kDType;
using Accumulator = DTypeTraits<kDType>::Accumulator;
constexpr int kThreads = Config::kThreads;
constexpr int kTile = Config::kTileN;  // outputs of a block at a time, if it distributes splits
constexpr int kManySplits = 8;

// Adds the partial sums first, first + step, ... of output `index`, in this order.
TC_DEVICE Accumulator add_partials(const MatmulParams& p, int splits, tc_int64 outputs,
                                   tc_int64 index, int first, int step) {
  auto from = static_cast<const Accumulator*>(p.partial) + first * outputs + index;
  Accumulator total = 0;
#pragma unroll 8
  for (int split = first; split < splits; split += step, from += step * outputs) total += *from;
  return total;
}

TC_DEVICE void write(const MatmulParams& p, tc_int64 index, Accumulator value) {
  tc_int64 outputs = p.m * p.n;
  tc_int64 batch = p.batch == 1 ? 0 : index / outputs;
  tc_int64 within = index - batch * outputs;
  // 32-bit where possible: a 64-bit division costs about 100 instructions.
  tc_int64 row = within < (1ll << 32) && p.n < (1ll << 32)
                     ? static_cast<u32>(within) / static_cast<u32>(p.n)
                     : within / p.n;
  store_output<kDType>(p, batch * outputs, row, within - row * p.n, value);
}

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    TC_KERNEL(const __grid_constant__ MatmulParams p) {
  wait_for_previous_kernel();
  __shared__ Accumulator parts[kThreads];
  const tc_int64 outputs = p.batch * p.m * p.n;
  const int splits = abs(p.splits);
  if (p.splits <= kManySplits) {
    tc_int64 step = static_cast<tc_int64>(gridDim.x) * kThreads;
    tc_int64 first = static_cast<tc_int64>(blockIdx.x) * kThreads + threadIdx.x;
    for (tc_int64 i = first; i < outputs; i += step) {
      write(p, i, add_partials(p, splits, outputs, i, 0, 1));
    }
    return;
  }
  int side = kTile;  // outputs of the block at a time: as many as there are, up to kTile
  while (side > 1 && side / 2 >= outputs) side /= 2;
  const int depth = kThreads / side;
  const int column = threadIdx.x % side, part = threadIdx.x / side;
  for (tc_int64 first = static_cast<tc_int64>(blockIdx.x) * side; first < outputs;
       first += static_cast<tc_int64>(gridDim.x) * side) {
    bool exists = first + column < outputs;
    parts[threadIdx.x] =
        exists ? add_partials(p, splits, outputs, first + column, part, depth) : Accumulator(0);
    for (int half = depth / 2; half > 0; half /= 2) {
      __syncthreads();
      if (part < half) parts[threadIdx.x] += parts[threadIdx.x + half * side];
    }
    if (part == 0 && exists) write(p, first + column, parts[threadIdx.x]);
    __syncthreads();
  }
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"kernels": [
  {"name": "reduce_matmul_{d.short}", "kind": "reduce", "alignment": "{d.bytes}",
   "tile": [1, 32, 1], "block": [256, 1, 1], "cost": {"k_tile": 0, "fixed": 2000},
   "defines": {"TC_DTYPE": "{d.dtype}"}, "for": {"d": "f16 bf16 f32 f64"}}]}
*/
