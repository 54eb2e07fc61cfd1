// Shape: the sizes of an op's result, before there is a tensor.
#pragma once

#include <cstdint>

#include "pytorch/tensor.h"

namespace torch_cubin {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Shape {
  int64_t dim = 0;
  int64_t sizes[kMaxDims];

  // Throws [input] past 2^63 - 1.
  int64_t numel() const;
};

}  // namespace torch_cubin
