// The parameter of the pad kernels, shared by host and device code: up to two matrices whose rows
// are copied to rows of whole 16-byte chunks, zero-padded at the end.
#pragma once

namespace torch_cubin {

typedef long long tc_int64;  // device code includes no <cstdint>

struct PadJob {
  const void* from;
  void* to;                                 // aligned to 16 bytes
  tc_int64 row_stride, batch_stride;        // of `from`, in elements
  tc_int64 to_row_stride, to_batch_stride;  // of `to`, in chunks of 16 bytes
  tc_int64 low, high;                       // the operand's address range, [low, high)
  unsigned int chunks;                      // per row of `to`
  unsigned int rows;                        // per batch
  unsigned int columns;                     // elements per row of `from`
  unsigned int total;                       // chunks of all rows of all batches
};

struct PadParams {
  PadJob jobs[2];
  unsigned int first_blocks;  // the number of blocks for jobs[0]; the others do jobs[1]
};

}  // namespace torch_cubin
