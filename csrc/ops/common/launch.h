// Launches of the catalog's kernels on PyTorch's current stream, and workspace memory for them.
#pragma once

#include <cstdint>
#include <optional>

#include "package/package_kernel.h"
#include "pytorch/stream.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// PackageKernel::launch() on PyTorch's current stream of the device.
template <class Params>
void launch(PackageKernel& kernel, const Grid& grid, const Device& device, const Params& params,
            bool overlap = true) {
  kernel.launch(grid, device, &params, &current_stream, overlap);
}

// Memory from PyTorch's caching allocator, aligned to at least 256 bytes. It may be destroyed right
// after the launch: the allocator reuses the memory in stream order.
class Workspace {
 public:
  Workspace(const Device& device, int64_t bytes)
      : tensor_(empty_cuda(&bytes, 1, ScalarType::Byte, device.index)) {}
  char* data() const { return static_cast<char*>(tensor_.mutable_data_ptr()); }

 private:
  friend class ZeroCounters;
  Tensor tensor_;
};

// Counters of one launch on PyTorch's current stream, which finds them zero and must leave them
// zero. They are the runtime's (runtime/counters.h), or, where it has none, a workspace that a fill
// kernel, a node in a CUDA graph, sets to zero.
class ZeroCounters {
 public:
  ZeroCounters(const Device& device, int64_t count);
  int* data() const { return data_; }

 private:
  std::optional<Workspace> filled_;
  int* data_;
};

}  // namespace torch_cubin
