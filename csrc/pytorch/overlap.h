// Whether two tensors have memory in common.
#pragma once

#include <cstdint>

namespace torch_cubin {

// Where a tensor's elements lie. `data` is null where it has none.
struct MemoryFacts {
  const void* data = nullptr;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;  // none is negative
  int64_t dim = 0;
  int64_t itemsize = 0;  // bytes
};

// Exact for slices of one tensor, in whatever dims, and for tensors without gaps. Where strides are
// so unlike each other that an answer would take long, or no memory could hold a tensor, it is true.
bool share_memory(const MemoryFacts& first, const MemoryFacts& second);

}  // namespace torch_cubin
