// The parameter of the kernels of this folder, shared by host and device code.
//
// Elements x of float16, bfloat16 or float32 become 8-bit floats q and scales s, with x ~ q * s:
//   s = the block's largest finite magnitude / the largest 8-bit number (448, or 57344 of e5m2),
//     at least 2^-126, or 1 if that magnitude is 0; with kQuantizePowerOfTwo the next power of two
//   q = x * (1 / s), rounded to nearest, ties to even; NaN if x is NaN or infinite
// in float32. A block is
//   rows.cu: 128 columns of a row, or all of a row; of `gated` kernels x is silu(gate) * up, with
//     the gate at x and the up `up` elements after it
//   tiles.cu: 128 x 128, or with kQuantizeColumns 128 rows of a column; with `blocks` these rows are
//     a block's of a group, and data has their columns where the block says
// Where `row_data` and `row_scales` are given, which kQuantizeTransposed is set for, tiles.cu also
// writes the result of rows.cu (with `blocks`), or its own of 128 x 128 that is not transposed.
//
// With `numbers`, for scales of 128 columns and for kQuantizeColumns, not for kQuantizeE5m2, row i
// is x[numbers[i]], zeros for numbers that x does not have.
#pragma once

#include "../common/group_blocks.h"

namespace torch_cubin {

enum QuantizeFlags {
  kQuantizePowerOfTwo = 1,
  kQuantizeE5m2 = 2,
  kQuantizeVectors = 4,      // x may be read by 16 bytes, and columns are a multiple of 8
  kQuantizeOutVectors = 8,   // data may be written by 8 bytes
  kQuantizeColumns = 16,     // tiles: a scale for 128 rows of each column
  kQuantizeTransposed = 32,  // tiles: data is (columns, rows)
  kQuantizeApart = 64,       // tiles: `blocks` or `row_data` is given
  kQuantizeReadOnce = 128    // gated: the L2 cache may drop x first
};

// Of rows with one scale: the threads of a block, and the elements that a thread keeps in
// registers. A row has as few threads as keep all of it, at least 8 and at most those of a block.
constexpr int kQuantizeThreads = 256, kQuantizeKept = 32, kQuantizeLeastLog2 = 3;

// Of scales of 128 columns: rows whose blocks of the same columns are quantised side by side.
constexpr int kQuantizeBand = 8;

// Of gated rows: blocks of threads of a multiprocessor, of which ptxas knows. In the flags, from
// bit kQuantizeEarly on, the number of those that are resident while the kernel before ends, and
// bring x to the L2 cache then; rows follow one another.
constexpr int kQuantizeGatedResident = 8, kQuantizeEarly = 16;

struct QuantizeParams {
  const void* x;
  unsigned char* data;
  float* scales;
  long long x_stride;     // elements, from row to row; columns are contiguous
  long long up;           // elements
  long long data_stride;  // bytes, from row to row of data
  // The scale of rows r (r / 128) and columns c is at r * scale_stride + c / 128 * scale_stride_k.
  // With kQuantizeColumns, at c * scale_stride + r / 128 * scale_stride_k.
  long long scale_stride, scale_stride_k;
  int rows, columns;  // of the result
  int flags;
  int row_threads_log2;  // of rows with one scale
  // 2^32 - 1 over the blocks of 128 columns of a row, rounded down: divides without a division.
  unsigned int inverse_blocks;
  const int* numbers;        // null: rows follow one another
  const GroupBlock* blocks;  // null: all rows are one group's; else kQuantizeTransposed is set
  int x_rows;                // of x, if there are numbers
  // (rows, columns), with the scale of row r and columns c at r + c / 128 * rows, or that of a
  // block of 128 x 128 at r / 128 * ceil(columns / 128) + c / 128; null: none.
  unsigned char* row_data;
  float* row_scales;
};

}  // namespace torch_cubin
