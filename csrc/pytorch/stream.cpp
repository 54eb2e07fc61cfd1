// Gets the current stream from the libtorch_cuda that the process has loaded.
//
// CPU builds of PyTorch lack the getter, so it is looked up instead of linked: one binary serves
// both.
#include "pytorch/stream.h"

#include <atomic>

#include "cubin/error.h"
#include "driver/dl.h"
#include "pytorch/internals.h"

namespace torch_cubin {
namespace {

using StreamGetter = int32_t (*)(int32_t device_index, void** stream);
std::atomic<StreamGetter> g_getter{nullptr};

StreamGetter find_getter() {
  void* library = dl_loaded("libtorch_cuda.so");
  void* symbol =
      library != nullptr ? pytorch_symbol("aoti_torch_get_current_cuda_stream") : nullptr;
  if (symbol == nullptr) {
    fail({"driver", "PyTorch", "has no CUDA stream to give", "a CUDA build of torch",
          library == nullptr ? "one without libtorch_cuda.so"
                             : "one without aoti_torch_get_current_cuda_stream",
          "Install a CUDA build of torch 2.11 or newer."});
  }
  return reinterpret_cast<StreamGetter>(symbol);
}

}  // namespace

[[gnu::hot]] CUstream current_stream(int device_index) {
  StreamGetter getter = g_getter.load(std::memory_order_acquire);
  if (getter == nullptr) {
    getter = find_getter();
    g_getter.store(getter, std::memory_order_release);
  }
  void* stream = nullptr;
  if (getter(device_index, &stream) != 0) {
    fail({"internal", "PyTorch's current stream", "could not be read",
          "a stream of cuda:" + std::to_string(device_index), "an error", ""});
  }
  return static_cast<CUstream>(stream);
}

CurrentStream current_stream_if_any() {
  return dl_loaded("libtorch_cuda.so") == nullptr ? nullptr : &current_stream;
}

}  // namespace torch_cubin
