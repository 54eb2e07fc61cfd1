// Packed sequences on Hopper: computes the order in which the kernels of sm90/forward.cu and
// sm90/backward.cu take their tiles, since only the device knows the sequences' lengths; and zeros
// rows that belong to no sequence.
//
// The order has one place for each tile of a sequence, of queries for the forward and of keys for
// the backward (TC_BACKWARD). Sequences that are close in memory come first, so that their data
// stay in the L2 cache, and among those the tiles with most work, so that short ones fill the end.
// Blocks of the backward wait for blocks of earlier keys of the same sequence, which therefore come
// before them.
//
// The first block computes the order by counting the tiles of each cost; a warp has a sequence. The
// others look for rows of no sequence: after a sequence's last one, if a bound truncates it, and
// before the first and after the last sequence.
//
// If cu_seqlens decrease, or leave the tensors' rows, there are no tiles, so that no later kernel
// accesses their targets, or waits for a turn that does not come; and all results are NaN.
#include "attention/numbers.cuh"
#include "order_params.h"
#include "sequence.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

constexpr int kThreads = TC_THREADS, kWarps = kThreads / 32;
constexpr int kBuckets = 4 * kThreads;
constexpr int kMostGroups = 128;  // of sequences that are close in memory

// The work of tile `tile`, in blocks of keys, or of queries.
TC_DEVICE int cost_of(const Sm90OrderParams& p, const Sm90Sequence& s, int tile) {
#if TC_BACKWARD
  int key = tile * p.tile_columns;
  int begin = max(0, key - s.last), end = min(s.rows, key + p.tile_columns - s.first);
  return end <= begin ? 0 : (end - 1) / p.tile_rows - begin / p.tile_rows + 1;
#else
  int row = tile * p.tile_rows;
  int begin = max(0, row + s.first), end = min(s.columns, row + p.tile_rows + s.last);
  return end <= begin ? 0 : (end - 1) / p.tile_columns - begin / p.tile_columns + 1;
#endif
}

// The cost of one head's tiles, in blocks of keys: their own, and kTileCost for a tile's overhead.
struct Work {
  unsigned long long all;
  int longest;
};
constexpr int kTileCost = 2;

// Puts each tile into a bucket of its cost. `start`: counts, or the next free places, of each
// bucket. Adds up `work` when it counts.
template <bool kPlace>
TC_DEVICE void schedule_tiles(const Sm90OrderParams& p, int* start, int groups, int group_rows,
                              Work* work) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int levels = kBuckets / groups;
  // The largest cost of a tile.
  int most = TC_BACKWARD ? (p.lengths.seqlen_q - 1) / p.tile_rows + 1
                         : (p.lengths.seqlen_k - 1) / p.tile_columns + 1;
  float scale = most < levels ? 1.0f : static_cast<float>(levels - 1) / most;
  [[maybe_unused]] Work own = {0, 0};  // of this lane's tiles
  for (int sequence = warp; sequence < p.batch; sequence += kWarps) {
    Sm90Sequence s(p.lengths, sequence);
    int tiles = TC_BACKWARD ? (s.columns + p.tile_columns - 1) / p.tile_columns
                            : (s.rows + p.tile_rows - 1) / p.tile_rows;
    int group = min(s.q_row / group_rows, groups - 1);
    [[maybe_unused]] int carried = 1 << 30;
    for (int i = lane; i - lane < tiles; i += 32) {
      int tile = TC_BACKWARD ? i : tiles - 1 - i;
      int cost = i < tiles ? cost_of(p, s, tile) : 0;
#if TC_BACKWARD
      // At most the cost of the sequence's earlier tiles, which therefore come first.
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        int before = __shfl_up_sync(~0u, cost, step);
        if (lane >= step) cost = min(cost, before);
      }
      cost = carried = min(cost, carried);
      carried = __shfl_sync(~0u, carried, 31);
#endif
      if (!kPlace && i < tiles) {
        own.all += cost + kTileCost;
        own.longest = max(own.longest, cost + kTileCost);
      }
      int level = min(static_cast<int>(cost * scale), levels - 1);
      int bucket = i < tiles ? (group + 1) * levels - 1 - level : -1;
      u32 same = __match_any_sync(~0u, bucket);
      int leader = __ffs(same) - 1, place = 0;
      if (lane == leader && bucket >= 0) place = atomicAdd(&start[bucket], __popc(same));
      place = __shfl_sync(~0u, place, leader) + __popc(same & ((1u << lane) - 1));
      if (kPlace && bucket >= 0 && place < p.capacity) p.order->places[place] = {sequence, tile};
    }
  }
  if constexpr (!kPlace) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) own.all += __shfl_xor_sync(~0u, own.all, step);
    own.longest = __reduce_max_sync(~0u, own.longest);
    if (lane == 0) {
      atomicAdd(&work->all, own.all);
      atomicMax(&work->longest, own.longest);
    }
  }
}

// The number of heads whose tiles together keep all blocks busy for as long as their longest tile
// takes. Blocks take the tiles of these last heads in one order: otherwise a long tile of the last
// head would start when others are about to end (causal, ten sequences of 228 to 4,096 rows at
// head_dim 256: 10% more time on an H100).
TC_DEVICE int last_heads(const Sm90OrderParams& p, const Work& work) {
  unsigned long long longest = static_cast<unsigned long long>(work.longest) * p.blocks;
  unsigned long long all = max(work.all, 1ull);
  return static_cast<int>(min((longest + all - 1) / all, static_cast<unsigned long long>(p.heads)));
}

// In place: for each bucket the number of tiles in earlier ones. Returns the total.
TC_DEVICE int sum_before(int* start, int* of_warps) {
  constexpr int kEach = kBuckets / kThreads;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, counts[kEach], sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    counts[i] = start[kEach * threadIdx.x + i];
    sum += counts[i];
  }
  int upto = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    int before = __shfl_up_sync(~0u, upto, step);
    if (lane >= step) upto += before;
  }
  if (lane == 31) of_warps[warp] = upto;
  __syncthreads();
  int before = upto - sum, all = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += of_warps[w];
    all += of_warps[w];
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    start[kEach * threadIdx.x + i] = before;
    before += counts[i];
  }
  __syncthreads();
  return all;
}

// Whether cu_seqlens are ascending row indices of the tensors; called by the whole block.
// Afterwards all of them are in the L1 cache, from which a warp will read each sequence's.
TC_DEVICE bool has_offsets(const Sm90OrderParams& p) {
  bool good = true;
  for (int i = threadIdx.x; i <= p.batch; i += kThreads) {
    int q = __ldg(p.lengths.cu_seqlens_q + i), k = __ldg(p.lengths.cu_seqlens_k + i);
    int least_q = i == 0 ? 0 : __ldg(p.lengths.cu_seqlens_q + i - 1);
    int least_k = i == 0 ? 0 : __ldg(p.lengths.cu_seqlens_k + i - 1);
    good = good && least_q <= q && q <= p.total_q && least_k <= k && k <= p.total_k;
  }
  return __syncthreads_and(good) != 0;
}

TC_DEVICE void make_order(const Sm90OrderParams& p, int* start, int* of_warps, Work* work) {
  if (threadIdx.x == 0) *work = {0, 0};
  for (int i = threadIdx.x; i < kBuckets; i += kThreads) start[i] = 0;
  int group_rows = max(p.rows_together, p.total_q / kMostGroups + 1);
  int groups = p.total_q / group_rows + 1;
  __syncthreads();
  schedule_tiles<false>(p, start, groups, group_rows, work);
  __syncthreads();
  int count = sum_before(start, of_warps);
  schedule_tiles<true>(p, start, groups, group_rows, work);
  if (threadIdx.x == 0) {
    p.order->next = 0;
    p.order->count = min(count, p.capacity);
    p.order->wrong_offsets = 0;
    p.order->last_heads = last_heads(p, *work);
  }
}

// The value that a row is filled with.
struct Filling {
  u32 word;
  float logsumexp;
};
constexpr Filling kZeros = {0, -kInfinity};
constexpr Filling kNans = {0x7FFF7FFF, __builtin_nanf("")};  // two, of either 16-bit type

TC_DEVICE void fill_row(const Sm90OrderParams& p, tc_int64 row, bool of_keys, Filling with) {
#pragma unroll 1
  for (int i = 0; i < 3; ++i) {
    const Sm90EmptyRows& to = p.empty_rows[i];
    if (to.data == nullptr || (to.of_keys != 0) != of_keys) continue;
    for (int at = threadIdx.x; at < to.heads * to.vectors; at += kThreads) {
      int head = at / to.vectors, vector = at - head * to.vectors;
      auto base = static_cast<u16*>(to.data) + head * to.stride[0] + row * to.stride[1];
      reinterpret_cast<uint4*>(base)[vector] =
          make_uint4(with.word, with.word, with.word, with.word);
    }
  }
  if (of_keys || p.logsumexp == nullptr) return;
  for (int head = threadIdx.x; head < p.heads; head += kThreads) {
    p.logsumexp[head * p.logsumexp_head + row] = with.logsumexp;
  }
}

// Rows [begin, end).
struct Gap {
  int begin, end;
};

TC_DEVICE void clear_empty_rows(const Sm90OrderParams& p, Gap* gaps, int* found, bool of_keys) {
  const int* offsets = of_keys ? p.lengths.cu_seqlens_k : p.lengths.cu_seqlens_q;
  int longest = of_keys ? p.lengths.seqlen_k : p.lengths.seqlen_q;
  int total = of_keys ? p.total_k : p.total_q;
  for (int first = 0; first < p.batch + 2; first += kThreads) {
    __syncthreads();
    if (threadIdx.x == 0) *found = 0;
    __syncthreads();
    int sequence = first + threadIdx.x;
    Gap gap = {0, 0};
    if (sequence < p.batch) {
      RowRange range(offsets, longest, sequence);
      gap = {range.begin + range.count, __ldg(offsets + sequence + 1)};
    } else if (sequence == p.batch) {
      gap = {__ldg(offsets + p.batch), total};
    } else if (sequence == p.batch + 1) {
      gap = {0, __ldg(offsets)};
    }
    if (gap.begin < gap.end) gaps[atomicAdd(found, 1)] = gap;
    __syncthreads();
    for (int i = 0; i < *found; ++i) {
      for (int row = gaps[i].begin + blockIdx.x - 1; row < gaps[i].end; row += gridDim.x - 1) {
        fill_row(p, row, of_keys, kZeros);
      }
    }
  }
}

TC_DEVICE void fill_all(const Sm90OrderParams& p, bool of_keys) {
  int total = of_keys ? p.total_k : p.total_q;
  for (int row = blockIdx.x - 1; row < total; row += gridDim.x - 1) {
    fill_row(p, row, of_keys, kNans);
  }
}

extern "C" __global__ void __launch_bounds__(TC_THREADS)
    TC_KERNEL(const __grid_constant__ Sm90OrderParams p) {
  __shared__ int start[kBuckets], of_warps[kWarps];
  __shared__ int found;
  __shared__ Work work;
  wait_for_previous_kernel();
  if (!has_offsets(p)) {
    if (blockIdx.x > 0) {
      fill_all(p, false);
      fill_all(p, true);
    } else if (threadIdx.x == 0) {
      p.order->next = p.order->count = 0;
      p.order->wrong_offsets = 1;
    }
  } else if (blockIdx.x == 0) {
    make_order(p, start, of_warps, &work);
  } else {
    static_assert(sizeof(Gap) * kThreads <= sizeof(start), "one memory for both");
    auto gaps = reinterpret_cast<Gap*>(start);
    clear_empty_rows(p, gaps, &found, false);
    clear_empty_rows(p, gaps, &found, true);
  }
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sm90_order_attention_{k.of}", "kind": "order", "of": "{k.of}", "dtype": "any",
   "math": "any", "tile": [1, 1, 1], "block": [1024, 1, 1], "cost": {"k_tile": 0, "fixed": 0},
   "defines": {"TC_BACKWARD": "{k.backward}"},
   "for": {"k": [{"of": "queries", "backward": 0}, {"of": "keys", "backward": 1}]}}]}
*/
