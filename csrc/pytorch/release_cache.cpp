// Makes PyTorch's caching allocator give its free blocks back when the driver has no memory for a
// kernel.
//
// NOTE: the stable ABI has no torch.cuda.empty_cache(). But the allocator empties its cache before it
// says that there is no memory, unless a CUDA graph is being captured: so it is asked for more than
// any GPU has. Below torch 2.13 its text goes to stderr.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "driver/dl.h"
#include "runtime/device_memory.h"

namespace torch_cubin {
namespace {

constexpr int64_t kMoreThanAnyGpu = int64_t{1} << 44;  // bytes: 16 TiB

void release_pytorch_cache(int device_index) {
  if (dl_loaded("libtorch_cuda.so") == nullptr) return;  // a CPU build of PyTorch
  const int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(1, &kMoreThanAnyGpu, &stride, aoti_torch_dtype_uint8(),
                               aoti_torch_device_type_cuda(), device_index, &handle) == 0) {
    aoti_torch_delete_tensor_object(handle);
  }
}

const bool registered = (set_release_cache(&release_pytorch_cache), true);

}  // namespace
}  // namespace torch_cubin
