// Before the `added` kernels of sm90/forward.cu: classifies an additive mask. For each tile of
// queries and block of keys it records whether all numbers are -inf, all are 0, or neither. Blocks
// that are all -inf are skipped and blocks of zeros are not read, as in causal masks and padding.
//
// A block of threads reads a tile of queries by four blocks of keys. If rows do not begin with
// whole vectors, because of their strides or their address, it also writes a copy in which they do.
#include "added_mask_params.h"
#include "mask_classes.cuh"
#include "mask_numbers.cuh"
#include "mask_params.h"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

constexpr int kTogether = 8;  // rows whose keys a thread requests at once
constexpr int kWarps = TC_THREADS / 32;

// Calls function(lane's first key, its block's place in the chunk) for this warp's keys up to
// `end`, of which each lane has kKeys at a time.
template <int kKeys, class Function>
TC_DEVICE void for_each_key(const Sm90AddedMaskParams& p, int first_column, int end,
                            Function&& function) {
#pragma unroll 1
  for (int column = first_column + threadIdx.x % 32 * kKeys; column < end; column += 32 * kKeys) {
    function(column, (column - first_column) / p.tile_columns);
  }
}

// Classes of this thread's part of the tile, two bits for each of the four blocks of keys. Rows
// begin with whole vectors, and blocks of keys are whole vectors.
template <class Type>
TC_DEVICE u32 classes_of(const Sm90AddedMaskParams& p, const typename Type::Number* from, int rows,
                         int first_column, int end) {
  constexpr int kKeys = 16 / sizeof(typename Type::Number);
  int warp = threadIdx.x / 32;
  u32 found = 0;
  for_each_key<kKeys>(p, first_column, min(end, p.columns), [&](int column, int block) {
    u32 of_block = 0;
    if (column + kKeys <= p.columns) {
#pragma unroll 1
      for (int first = warp; first < rows; first += kTogether * kWarps) {
        uint4 vector[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          int row = min(first + j * kWarps, rows - 1);
          vector[j] = __ldg(reinterpret_cast<const uint4*>(from + row * p.stride[2] + column));
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) of_block |= class_of<Type>(vector[j], p.minus_infinity);
      }
    } else {  // the memory after the last key is not part of the mask
#pragma unroll 1
      for (int row = warp; row < rows; row += kWarps) {
        for (int i = column; i < p.columns; ++i) {
          auto number = __ldg(from + row * p.stride[2] + i);
          of_block |= class_of<Type>(Type::join(number, number), p.minus_infinity);
        }
      }
    }
    found |= of_block << 2 * block;
  });
  return found;
}

// The same, and writes the copy, in which rows begin with whole vectors. They are written up to a
// whole vector, because they are read so.
template <class Type>
TC_DEVICE u32 copy_and_classes_of(const Sm90AddedMaskParams& p, const typename Type::Number* from,
                                  typename Type::Number* to, int rows, int first_column, int end) {
  using Number = typename Type::Number;
  using Pair = typename Type::Pair;
  u32 found = 0;
  for_each_key<2>(p, first_column, min(end, p.copy_columns), [&](int column, int block) {
    u32 of_block = 0;
#pragma unroll 1
    for (int row = threadIdx.x / 32; row < rows; row += kWarps) {
      const Number* at = from + row * p.stride[2] + column * p.stride[3];
      Pair pair = Type::join(0, 0);
      if (column < p.columns) {
        Number left = __ldg(at), right = column + 1 == p.columns ? left : __ldg(at + p.stride[3]);
        pair = Type::join(left, right);
        of_block |= class_of<Type>(pair, p.minus_infinity);
      }
      *reinterpret_cast<Pair*>(to + tc_int64(row) * p.copy_columns + column) = pair;
    }
    found |= of_block << 2 * block;
  });
  return found;
}

template <class Type>
TC_DEVICE u32 classes_of(const Sm90AddedMaskParams& p, tc_int64 batch, tc_int64 head, int first_row,
                         int first_column) {
  using Number = typename Type::Number;
  int rows = min(p.tile_rows, p.rows - first_row);
  int end = first_column + kMaskTileBlocks * p.tile_columns;
  auto from = static_cast<const Number*>(p.mask) + batch * p.stride[0] + head * p.stride[1] +
              first_row * p.stride[2];
  if (p.copies == nullptr) return classes_of<Type>(p, from, rows, first_column, end);
  auto to = static_cast<Number*>(p.copies) +
            ((batch * p.heads + head) * p.rows + first_row) * p.copy_columns;
  return copy_and_classes_of<Type>(p, from, to, rows, first_column, end);
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, 4)
    TC_KERNEL(const __grid_constant__ Sm90AddedMaskParams p) {
  __shared__ u32 found;
  wait_for_previous_kernel();
  int chunk = blockIdx.x % p.chunks;
  tc_int64 line = blockIdx.x / p.chunks, plane = line / p.tiles;
  tc_int64 batch = plane / p.heads, head = plane - batch * p.heads;
  int tile = static_cast<int>(line - plane * p.tiles);
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.next = 0;
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  int first_row = tile * p.tile_rows, first_column = chunk * kMaskTileBlocks * p.tile_columns;
  u32 classes = p.floats ? classes_of<Floats>(p, batch, head, first_row, first_column)
                         : classes_of<Halves>(p, batch, head, first_row, first_column);
  classes = __reduce_or_sync(~0u, classes);
  if (threadIdx.x % 32 == 0) atomicOr(&found, classes);
  __syncthreads();
  if (threadIdx.x == 0) store_classes(p, line, chunk, found);
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sm90_added_mask_attention", "kind": "mask", "dtype": "any", "math": "any",
   "alignment": 1, "takes": ["added_alone", "added_mask", "float_mask"], "tile": [128, 128, 1],
   "block": [256, 1, 1], "cost": {"k_tile": 0, "fixed": 0}}]}
*/
