// The parameter of the softmax kernels of rows, shared by host and device code.
//
// softmax            out = exp(x - max) / sum, or with `log` x - max - log(sum)
//   with targets     losses = (1 - s) * (logsumexp - x[target]) + s * (logsumexp - mean(x)), with
//                    s = label_smoothing and logsumexp = max + log_sum, and max and log_sum of each
//                    row; `out` is not written
//   and grad_losses  out = grad_losses * (exp(x - logsumexp) - (1 - s) * [target] - s / columns)
// softmax_backward   x is the output: grad_x = x * (grad_out - sum(x * grad_out)), or with `log`
//                    grad_out - exp(x) * sum(grad_out)
//
// Rows are contiguous, and follow each other in strides of elements; those of `out`, which is
// grad_x in the derivative, in `columns`. If `columns` is a multiple of eight,
// all rows begin at multiples of 16 bytes. A row with a NaN or +inf, or of -inf alone, is all NaN.
// A row whose target is ignore_index has loss and gradient 0, and is not counted; with other
// targets that are no column both are NaN.
#pragma once

namespace torch_cubin {

typedef long long tc_int64;  // device code includes no <cstdint>

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
  const tc_int64* targets;   // null: none
  const float* grad_losses;  // null: computes losses
  float* losses;
  float* counted;  // 1, or 0 for an ignored row
  float* max;      // of the row
  float* log_sum;  // the logarithm of the sum of exp(x - max)
  tc_int64 ignore_index;
  float label_smoothing;
};

}  // namespace torch_cubin
