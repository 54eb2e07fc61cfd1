// The one parameter of the pad kernels, shared by host and device code: up to two matrices whose rows
// are copied to rows of whole 16-byte chunks, zeros behind their ends.
#pragma once

namespace torch_cubin {

typedef long long tc_int64;  // device code includes no <cstdint>

struct PadJob {
  const void* from;
  void* to;                                 // at a multiple of 16 bytes
  tc_int64 row_stride, batch_stride;        // of `from`, in elements
  tc_int64 to_row_stride, to_batch_stride;  // of `to`, in chunks of 16 bytes
  tc_int64 low, high;                       // addresses: the operand's bytes lie in [low, high)
  unsigned int chunks;                      // of a row of `to`
  unsigned int rows;                        // of a batch
  unsigned int columns;                     // elements of a row of `from`
  unsigned int total;                       // chunks of all rows of all batches
};

struct PadParams {
  PadJob jobs[2];
  unsigned int first_blocks;  // blocks of jobs[0]; the others do jobs[1]
};

}  // namespace torch_cubin
