// The parameter of the finish kernels, shared by host and device code.
//
// out[b, m, n] = round(activation(alpha * sums[b, m, n] + bias[n]) + beta * addend[b, m, n])
//
// aux[b, m, n] = round(alpha * sums[b, m, n] + bias[n])
//
// where the sums of all splits are added in order. `sums` (float32; float64 for float64), `out` and
// `aux` are contiguous. Strides are in elements.
#pragma once

#include "activation_params.h"

namespace torch_cubin {

typedef long long tc_int64;  // device code includes no <cstdint>

struct FinishParams {
  const void* sums;
  void* out;
  void* aux;           // null: not wanted
  const void* bias;    // null: none
  const void* addend;  // null: none
  tc_int64 rows;       // in all batches
  tc_int64 m, n;
  tc_int64 bias_stride;
  tc_int64 addend_stride_m, addend_stride_n;
  tc_int64 batch_size[4];  // innermost first, 1 where unused
  tc_int64 addend_batch_stride[4];
  double alpha, beta;
  int activation;
  int splits;             // contiguous matrices of sums
  int vectors;            // whether out, aux and sums can be accessed four elements at a time
  ActivationCurve curve;  // for the activation
};

}  // namespace torch_cubin
