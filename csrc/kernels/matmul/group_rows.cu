// Finds the rows of tiles of a product of groups. group_rows_params.h defines them.
//
// One block. Threads have a group each, and then a row of tiles each, whose group they search.
#include "common/ptx.cuh"
#include "group_rows_params.h"

namespace torch_cubin::TC_KERNEL {

TC_DEVICE int end_of(const GroupRowsParams& p, int group) {
  const tc_int64 end = p.wide_ends ? static_cast<const tc_int64*>(p.ends)[group]
                                   : static_cast<const int*>(p.ends)[group];
  return end < 0 || end > p.limit ? -1 : static_cast<int>(end);
}

// A thread's group of those from `base` on.
struct OwnGroup {
  int number, start, end;
  bool exists;
};

// Reads it, and lowers `first_wrong`, which is shared, if its end is wrong; then threads wait.
TC_DEVICE OwnGroup own_group(const GroupRowsParams& p, int base, int* first_wrong) {
  const int number = base + threadIdx.x;
  const bool exists = number < p.groups;
  const int start = !exists || number == 0 ? 0 : end_of(p, number - 1);
  const int end = exists ? end_of(p, number) : 0;
  if (exists && end < start) atomicMin(first_wrong, number);
  __syncthreads();
  return {number, start, end, exists};
}

// The sum of `value` over the threads up to this one.
TC_DEVICE int sum_to_here(int value, int* sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  if (lane == 31) sums[warp] = value;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < TC_THREADS / 32; ++i) {
    if (i < warp) value += sums[i];
  }
  return value;
}

// Stores the groups of K; `first_wrong` is shared, the number of groups at first.
TC_DEVICE void store_groups(const GroupRowsParams& p, int* first_wrong) {
  for (int base = 0; base < p.groups; base += TC_THREADS) {
    const auto [group, start, end, exists] = own_group(p, base, first_wrong);
    const bool is_wrong = group >= *first_wrong, has_k = !is_wrong && start < end;
    const int first = has_k ? start : 0;
    if (exists) {
      p.rows[1 + group] = {first, has_k ? end : 0, first / kGroupBlock, is_wrong, 1, 0, 0};
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) p.rows[0] = {p.groups, 0, 0, 0};
}

// Stores the blocks of rows of groups, and the groups of a K that has these apart.
TC_DEVICE void store_blocks(const GroupRowsParams& p, int* first_wrong, int* sums) {
  __shared__ int last_block, last_k;
  int blocks = 0, k = 0;  // of the groups before this round's
  for (int base = 0; base < p.groups; base += TC_THREADS) {
    const auto [group, start, end, exists] = own_group(p, base, first_wrong);
    const bool is_wrong = group >= *first_wrong;
    const int rows = exists && !is_wrong ? end - start : 0;
    const int own = (rows + kGroupBlock - 1) / kGroupBlock;
    const int size = (rows + p.align - 1) & -p.align;
    const int block_end = blocks + sum_to_here(own, sums);
    __syncthreads();
    const int k_end = k + sum_to_here(size, sums), to = k_end - size;
    if (threadIdx.x == TC_THREADS - 1) last_block = block_end, last_k = k_end;
    const int first = block_end - own;
    if (exists) {
      const bool has_k = rows > 0;  // else the product reads the first block's scale
      p.rows[1 + group] = {has_k ? to : 0, has_k ? k_end : 0, has_k ? first : 0, is_wrong, 1, 1, 0};
    }
    for (int i = 0; i < own; ++i) {
      const int before = i * kGroupBlock, after = before + kGroupBlock;
      p.blocks[1 + first + i] = {start + before, min(start + after, end), to + before,
                                 min(to + after, k_end)};
    }
    __syncthreads();
    blocks = last_block, k = last_k;
  }
  if (threadIdx.x == 0) {
    p.rows[0] = {p.groups, 0, 0, 0};
    p.blocks[0] = {blocks, 0, 0, 0};
  }
}

extern "C" __global__ void __launch_bounds__(TC_THREADS)
    TC_KERNEL(const __grid_constant__ GroupRowsParams p) {
  __shared__ int starts[TC_THREADS], last_rows[TC_THREADS], sums[TC_THREADS / 32];
  __shared__ int first_wrong;
  wait_for_previous_kernel();
  if (threadIdx.x == 0) first_wrong = p.groups;
  __syncthreads();
  if (p.blocks != nullptr) {
    store_blocks(p, &first_wrong, sums);
    return;
  }
  if (p.of_k) {
    store_groups(p, &first_wrong);
    return;
  }
  int written = 0;
  for (int base = 0; base < p.groups; base += TC_THREADS) {
    const auto [group, start, end, exists] = own_group(p, base, &first_wrong);
    const bool has_rows = exists && group <= first_wrong;
    const int left = (group == first_wrong ? p.limit : end) - start;
    const int own = has_rows ? (left + p.height - 1) / p.height : 0;
    starts[threadIdx.x] = start;
    last_rows[threadIdx.x] = sum_to_here(own, sums);
    __syncthreads();
    const int total = last_rows[TC_THREADS - 1];
    for (int row = threadIdx.x; row < total; row += TC_THREADS) {
      int low = 0, high = TC_THREADS - 1;  // the first thread with more rows than `row` so far
      while (low < high) {
        const int middle = (low + high) / 2;
        if (last_rows[middle] > row) {
          high = middle;
        } else {
          low = middle + 1;
        }
      }
      const int first = low == 0 ? 0 : last_rows[low - 1], inside = row - first;
      const int rows = last_rows[low] - first, bands = (rows + p.band - 1) / p.band;
      const int height = (rows + bands - 1) / bands, begin = inside / height * height;
      const bool wrong = base + low == first_wrong;
      const int last = wrong ? p.limit : end_of(p, base + low);
      p.rows[1 + written + row] = {starts[low] + inside * p.height,
                                   last,
                                   base + low,
                                   wrong,
                                   static_cast<unsigned char>(min(height, rows - begin)),
                                   static_cast<unsigned char>(inside - begin),
                                   static_cast<unsigned char>(begin / height & 1)};
    }
    written += total;
    if (first_wrong < p.groups) break;
    __syncthreads();
  }
  if (threadIdx.x == 0) p.rows[0] = {written, 0, 0, 0};
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "group_rows_matmul", "family": "groups", "kind": "group_rows", "dtype": "any",
   "math": "any", "tile": [1024, 1, 1], "block": [1024, 1, 1], "cost": {}}]}
*/
