// The parameter of the kernel that scales a tensor, shared by host and device code.
//
// scale   x *= factor, which is one element on the device; x is dense. With `vectors`, `count` is a
//         multiple of eight, and x begins at a multiple of 16 bytes.
#pragma once

#include "rows_params.h"

namespace torch_cubin {

struct ScaleParams {
  void* x;
  const void* factor;
  tc_int64 count;
  int x_dtype, factor_dtype;
  int vectors;
};

}  // namespace torch_cubin
