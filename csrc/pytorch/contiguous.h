// Contiguous layouts as PyTorch defines them. Plain integers: includes nothing of torch.
#pragma once

#include <cstdint>

namespace torch_cubin {

inline bool has_elements(const int64_t* sizes, int64_t dim) {
  for (int64_t i = 0; i < dim; ++i) {
    if (sizes[i] == 0) return false;
  }
  return true;
}

inline bool is_contiguous(const int64_t* sizes, const int64_t* strides, int64_t dim) {
  if (!has_elements(sizes, dim)) return true;
  uint64_t step = 1;  // unsigned: the product of all sizes may exceed 2^63
  for (int64_t i = dim - 1; i >= 0; --i) {
    if (sizes[i] != 1 && static_cast<uint64_t>(strides[i]) != step) return false;
    step *= static_cast<uint64_t>(sizes[i]);
  }
  return true;
}

// The strides of a fresh tensor. Unspecified if they overflow 64 bits: no memory is that large.
inline void contiguous_strides(const int64_t* sizes, int64_t dim, int64_t* strides) {
  uint64_t step = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = static_cast<int64_t>(step);
    if (sizes[i] > 1) step *= static_cast<uint64_t>(sizes[i]);
  }
}

}  // namespace torch_cubin
