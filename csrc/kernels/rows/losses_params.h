// The parameter of the kernels of cross entropy, shared by host and device code.
//
// With w the weights of the classes (or ones), W their sum, t a row's target, logsumexp = max +
// log_sum, and u = label_smoothing / classes:
//
// losses            loss = (1 - label_smoothing) * w[t] * (logsumexp - x[t])
//                          + u * (W * logsumexp - sum(w * x)), and max and log_sum of each row
// losses_sum        total = sum(w[t]), and if asked for out = sum(losses), or with mean
//                   sum(losses) / total
// losses_backward   out = grad / total * (((1 - label_smoothing) * w[t] + u * W)
//                                             * exp(x - logsumexp)
//                                         - (1 - label_smoothing) * w[t] * [j = t] - u * w)
//
// Rows are contiguous, and follow each other in strides of elements; those of `out`, which may be
// x, in `columns`. If `columns` is a multiple of eight, all rows begin at multiples of 16 bytes. A
// row with a NaN or +inf, or of -inf alone, is all NaN. A row whose target is ignore_index has
// loss, weight and gradient 0 and is not read; with other targets that are no class they are NaN.
#pragma once

#include "rows_params.h"

namespace torch_cubin {

struct LossesParams {
  const void* x;
  void* out;
  tc_int64 rows;
  tc_int64 x_stride;
  int columns;             // losses_sum: the rows
  int first, classes;      // the columns are these of all classes; losses takes all
  int threads;             // of a row, in each of its blocks
  int cluster;             // blocks of a row
  int x_dtype, out_dtype;  // of losses_backward that of x
  const tc_int64* targets;
  const void* weight;  // null: ones
  int weight_dtype;
  float label_smoothing;
  const float* weight_sum;  // of a call with weight and label_smoothing
  tc_int64 ignore_index;
  void* losses;
  int losses_dtype;
  int each_grad;  // whether `grad` has an element for each row, or one for all
  float* max;
  float* log_sum;
  const void* grad;  // in the dtype of losses
  float* total;      // losses_backward: null for 1
  int mean;
};

}  // namespace torch_cubin
