// The one parameter of the finish kernels, shared by host and device code.
//
// out[b, m, n] = round(activation(alpha * sums[b, m, n] + bias[n]) + beta * addend[b, m, n])
//
// where sums are those of all splits, added in order. `sums` (float32; float64 for float64) and `out` are
// contiguous. Strides are in elements.
#pragma once

#include "activation_params.h"

namespace torch_cubin {

typedef long long tc_int64;  // device code includes no <cstdint>

struct FinishParams {
  const void* sums;
  void* out;
  const void* bias;    // null: none
  const void* addend;  // null: none
  tc_int64 rows;       // of all batches
  tc_int64 m, n;
  tc_int64 bias_stride;
  tc_int64 addend_stride_m, addend_stride_n;
  tc_int64 batch_size[4];  // innermost first, 1 where unused
  tc_int64 addend_batch_stride[4];
  double alpha, beta;
  int activation;
  int splits;             // matrices of sums, one after the other
  int vectors;            // whether out and sums can be reached four elements at a time
  ActivationCurve curve;  // of the activation
};

}  // namespace torch_cubin
