// Whether a layout is contiguous, as PyTorch defines it. Plain integers: includes nothing of torch.
#pragma once

#include <cstdint>

namespace torch_cubin {

inline bool is_contiguous(const int64_t* sizes, const int64_t* strides, int64_t dim) {
  for (int64_t i = 0; i < dim; ++i) {
    if (sizes[i] == 0) return true;
  }
  uint64_t step = 1;  // after the last dim it may be past 2^63
  for (int64_t i = dim - 1; i >= 0; --i) {
    if (sizes[i] != 1 && static_cast<uint64_t>(strides[i]) != step) return false;
    step *= static_cast<uint64_t>(sizes[i]);
  }
  return true;
}

}  // namespace torch_cubin
