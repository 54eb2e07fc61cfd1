// The parameter of the transpose kernels, shared by host and device code: up to two matrices to
// transpose.
#pragma once

namespace torch_cubin {

typedef long long tc_int64;  // device code includes no <cstdint>

struct TransposeJob {
  const void* from;
  void* to;                                 // aligned to 16 bytes
  tc_int64 row_stride, batch_stride;        // of `from`, in elements
  tc_int64 to_row_stride, to_batch_stride;  // of `to`, in elements, multiples of 16 bytes
  int rows, columns;                        // per batch of `from`
  int tiles_rows, tiles_columns;            // tiles along rows and columns, one block each
  int vectors;  // whether every row of `from` is read 16 bytes at a time
};

struct TransposeParams {
  TransposeJob jobs[2];
  unsigned int first_blocks;  // the number of blocks for jobs[0]; the others do jobs[1]
  int rounds;                 // to TF32
};

}  // namespace torch_cubin
