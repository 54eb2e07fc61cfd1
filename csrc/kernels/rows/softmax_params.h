// The parameter of the softmax kernels of rows, shared by host and device code.
//
// softmax            out = exp(x - max) / sum, or with `log` x - max - log(sum)
// softmax_backward   x is the output: grad_x = x * (grad_out - sum(x * grad_out)), or with `log`
//                    grad_out - exp(x) * sum(grad_out)
//
// Rows are contiguous, and follow each other in strides of elements; those of `out`, which is
// grad_x in the derivative, in `columns`. If `columns` is a multiple of eight,
// all rows begin at multiples of 16 bytes. A row with a NaN or +inf, or of -inf alone, is all NaN.
#pragma once

#include "rows_params.h"

namespace torch_cubin {

struct RowsSoftmaxParams {
  const void* x;
  const void* grad_out;
  void* out;
  tc_int64 rows;
  tc_int64 x_stride, grad_out_stride;
  int columns;
  int threads;             // of a row
  int cluster;             // blocks of a row
  int x_dtype, out_dtype;  // grad_out has that of x
  int log;
};

}  // namespace torch_cubin
