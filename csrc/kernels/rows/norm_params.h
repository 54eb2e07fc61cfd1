// The parameter of the norm kernels, shared by host and device code: layer norm and RMS norm.
//
// norm            sum = round(x + residual), or x without a residual
//                 out = (sum - mean) * rstd * weight + bias, mean and rstd of each row
// norm_backward   x is the sum of the above:
//                 grad_x = rstd * (g - x_hat * mean(g * x_hat) - mean(g)) + grad_sum
//                 with g = grad_out * weight, x_hat = (x - mean) * rstd
// norm_backward_sums  the same, and sums_w and sums_b: grad_out * x_hat and grad_out, summed over
//                 a part of the rows
// norm_backward_few  norm_backward, and grad_weight and grad_bias, of few rows
// norm_columns    sums_w and sums_b alone
// norm_parts      grad_weight and grad_bias, the sums of sums_w's and sums_b's parts
//
// Without `centered` (RMS norm) mean and mean(g) are zero. Rows are contiguous, and
// follow each other in strides of elements; strides of other tensors are `columns`. If `columns` is
// a multiple of eight, all rows begin at multiples of 16 bytes.
#pragma once

#include "rows_params.h"

namespace torch_cubin {

struct NormParams {
  const void* x;
  const void* residual;  // null: none
  const void* weight;    // null: ones
  const void* bias;      // null: zeros
  void* out;
  void* sum;    // null: not written
  float* mean;  // one a row; null unless centered
  float* rstd;
  const void* grad_out;
  const void* grad_sum;  // null: none
  void* grad_x;
  float* sums_w;  // [parts][columns]; null: not needed
  float* sums_b;
  void* grad_weight;
  void* grad_bias;
  tc_int64 rows;
  tc_int64 x_stride, residual_stride, grad_out_stride, grad_sum_stride;
  int columns;
  int threads;    // of a row
  int cluster;    // blocks of a row
  int vectors;    // norm_backward_sums, _few: of each thread, at most
  int row_dtype;  // of all tensors but these
  int weight_dtype, bias_dtype;
  int centered;
  int parts;       // norm_columns: of the rows; norm_backward_few: blocks that have columns
  int sums_parts;  // norm_parts: parts to sum
  float eps;
};

}  // namespace torch_cubin
