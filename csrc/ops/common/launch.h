// Launches of the catalog's kernels on PyTorch's current stream, and workspace memory for them.
#pragma once

#include <cstdint>

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
  // `zeroed` costs one fill kernel, a node in a CUDA graph.
  Workspace(const Device& device, int64_t bytes, bool zeroed = false)
      : tensor_(empty_cuda(&bytes, 1, ScalarType::Byte, device.index)) {
    if (zeroed) fill_with_zeros(tensor_);
  }
  char* data() const { return static_cast<char*>(tensor_.mutable_data_ptr()); }

 private:
  static void fill_with_zeros(Tensor& tensor);
  Tensor tensor_;
};

}  // namespace torch_cubin
