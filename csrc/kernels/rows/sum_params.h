// The parameter of the kernel of sums over rows, shared by host and device code.
//
//   kRowSum          out = sum(x) / divisor
//   kRowSquares      out = sum(x^2) / divisor
//   kRowDeviations   out = sum((x - mean(x))^2) / divisor
//
// Rows are contiguous, and follow each other in a stride of elements. If `columns` is a multiple of
// eight, all rows begin at multiples of 16 bytes.
#pragma once

#include "rows_params.h"

namespace torch_cubin {

enum RowSumKind : int { kRowSum, kRowSquares, kRowDeviations, kRowSumKinds };

struct RowSumParams {
  const void* x;
  void* out;  // one element a row
  tc_int64 rows;
  tc_int64 x_stride;
  int columns;
  int threads;  // of a row, in each of its blocks
  int cluster;  // blocks of a row
  int x_dtype, out_dtype;
  int kind;
  float divisor;
};

}  // namespace torch_cubin
