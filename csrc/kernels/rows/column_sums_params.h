// The parameter of the kernel of sums over the rows of a matrix, shared by host and device code.
//
//   out[part, column] = sum(x[row, column] for the rows of the part)
//
// or with `joins`, in clusters of `parts` blocks, the sum of all parts in out[0, column].
// Rows are contiguous, and follow each other in a stride of elements. If `columns` is a multiple of
// eight, all rows begin at multiples of 16 bytes.
#pragma once

#include "rows_params.h"

namespace torch_cubin {

struct ColumnSumsParams {
  const void* x;
  void* out;  // [parts][columns]
  tc_int64 rows;
  tc_int64 x_stride;
  int columns;
  int parts;
  int out_dtype;
  int joins;
};

}  // namespace torch_cubin
