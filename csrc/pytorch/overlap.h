// Whether two tensors have memory in common.
#pragma once

#include <cstdint>

namespace torch_cubin {

// Address, sizes and strides of a tensor. `data` is null for a tensor without elements.
struct MemoryFacts {
  const void* data = nullptr;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;  // none is negative
  int64_t dim = 0;
  int64_t itemsize = 0;  // bytes
};

// Whether two tensors share memory. Exact for slices of one tensor along any dims, and for tensors
// without gaps. Conservatively true when the strides would need a long search, or when no memory
// could hold one of the tensors.
bool share_memory(const MemoryFacts& first, const MemoryFacts& second);

}  // namespace torch_cubin
