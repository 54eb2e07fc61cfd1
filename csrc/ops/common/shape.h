// Shape: the sizes of an op's result before it is allocated.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "pytorch/tensor.h"

namespace torch_cubin {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The accumulation dtype for elements of a dtype.
inline ScalarType sums_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

struct Shape {
  int64_t dim = 0;
  int64_t sizes[kMaxDims];

  // Throws [input] past 2^63 - 1.
  int64_t numel() const;
  void append(int64_t size) { sizes[dim++] = size; }
  bool is_of(const TensorView& view) const {
    return view.dim == dim && std::equal(sizes, sizes + dim, view.sizes);
  }
  std::vector<int64_t> vector() const { return {sizes, sizes + dim}; }
  std::string text() const { return tuple_text(sizes, dim); }
};

}  // namespace torch_cubin
