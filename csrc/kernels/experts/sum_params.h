// The parameter of sum.cu, shared by host and device code.
//
//   out[t, n] = round(sum over j of weights[t, j] * rows[places[t, j], n])
//
// in float32, in the order of j; a place that `rows` does not have, such as -1, adds nothing,
// whatever its weight. All are contiguous.
#pragma once

#include "weights.h"

namespace torch_cubin {

struct ExpertSumParams {
  const void* rows;
  const int* places;
  const void* weights;
  void* out;
  int row_count;
  int tokens, columns, k;
  int elements;  // of a thread: of 16 bytes where columns are a multiple of them, else 1
  int weights_type;
};

}  // namespace torch_cubin
