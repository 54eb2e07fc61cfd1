// Sorts tokens by their experts: a stable counting sort. order_params.h defines the result.
//
// A block has a chunk of the ids, and each of its warps a part of it: it counts the experts of each
// part, adds up where each part's ids of an expert begin, and counts again to place them.
#include "common/ptx.cuh"
#include "order_params.h"

namespace torch_cubin::TC_KERNEL {

constexpr int kWarps = TC_THREADS / 32;
constexpr int kRounds = kOrderChunk / TC_THREADS;  // of 32 ids of a warp
static_assert(kOrderChunk % TC_THREADS == 0);

struct Chunk {
  const ExpertOrderParams& p;

  // The id at `index` as the number of its counter; the last one is for ids of no expert.
  TC_DEVICE int expert(int index) const {
    const tc_int64 id = p.wide_ids ? static_cast<const tc_int64*>(p.ids)[index]
                                   : static_cast<const int*>(p.ids)[index];
    return id < 0 || id >= p.experts ? p.experts : static_cast<int>(id);
  }

  // Calls visit(index, expert, rank) for the warp's ids in rounds, where rank is the number of
  // earlier ids of the expert in this round and warp; then adds the round to the warp's counters.
  template <class Visit>
  TC_DEVICE void count(int* counters, Visit visit) const {
    const int lane = threadIdx.x % 32;
    int index = blockIdx.x * kOrderChunk + threadIdx.x / 32 * (kRounds * 32) + lane;
    int own[kRounds];
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      own[i] = index + 32 * i < p.size ? expert(index + 32 * i) : -1;
    }
#pragma unroll
    for (int i = 0; i < kRounds; ++i, index += 32) {
      const unsigned alike = __match_any_sync(~0u, own[i]);
      const int rank = __popc(alike & ((1u << lane) - 1));
      if (own[i] >= 0) visit(index, own[i], counters[own[i]] + rank);
      __syncwarp();
      if (own[i] >= 0 && rank == 0) counters[own[i]] += __popc(alike);
      __syncwarp();
    }
  }
};

// The sum of `value` over the threads before this one. `sums` is shared memory for the warps' sums,
// whose total goes to `total`.
TC_DEVICE int sum_before(int value, int* sums, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();  // the last sums have been read
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  int before = 0;
  total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    if (i == warp) before = total;
    total += sums[i];
  }
  return before + sum - value;
}

extern "C" __global__ void __launch_bounds__(TC_THREADS)
    TC_KERNEL(const __grid_constant__ ExpertOrderParams p) {
  __shared__ int counters[kWarps][kMostOrderedExperts + 1];
  __shared__ int sums[kWarps];
  wait_for_previous_kernel();
  const Chunk chunk{p};
  const int numbers = p.experts + 1;
  int* const own = counters[threadIdx.x / 32];
  for (int i = threadIdx.x; i < numbers; i += TC_THREADS) {
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) counters[warp][i] = 0;
  }
  __syncthreads();
  chunk.count(own, [](int, int, int) {});
  __syncthreads();

  int first = 0;  // place of the first expert of this round
  for (int round = 0; round < numbers; round += TC_THREADS) {
    const int i = round + threadIdx.x;
    int here = 0, before = 0, all = 0;  // ids of expert i: in this chunk, in those before, in all
    if (i < numbers) {
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) here += counters[warp][i];
      all = here;
      if (p.counts_only) {
        p.counts[blockIdx.x * numbers + i] = here;
      } else if (gridDim.x > 1) {
        all = 0;
#pragma unroll 8
        for (int other = 0; other < gridDim.x; ++other) {
          const int count = p.counts[other * numbers + i];
          all += count;
          if (other < blockIdx.x) before += count;
        }
      }
    }
    if (p.counts_only) continue;
    int total;
    const int start = first + sum_before(all, sums, total);
    first += total;
    if (i >= numbers) continue;
    if (blockIdx.x == 0 && i < p.experts) p.ends[i] = start + all;
    int place = start + before;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const int count = counters[warp][i];
      counters[warp][i] = place;
      place += count;
    }
  }
  if (p.counts_only) return;
  __syncthreads();
  chunk.count(own, [&](int index, int expert, int place) {
    p.tokens[place] = index / p.k;
    p.places[index] = expert < p.experts ? place : -1;
  });
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "order_experts", "kind": "order", "dtype": "any", "math": "any", "alignment": 4,
   "tile": [1024, 1, 1], "block": [256, 1, 1], "cost": {}}]}
*/
