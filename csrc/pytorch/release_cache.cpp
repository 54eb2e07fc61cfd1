// Empties PyTorch's caching allocator when the driver has no memory left to load a kernel.
//
// NOTE: the stable ABI has no torch.cuda.empty_cache(). The allocator empties its cache before it
// reports out of memory (except during graph capture), so this requests more than any GPU has.
// Below torch 2.13 the message of that failure goes to stderr.
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
