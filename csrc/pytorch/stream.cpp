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
using StreamUse = int32_t (*)(void* stream);
using StreamNumber = int32_t (*)(void* stream, int64_t* id);
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

// Whether the current stream of a device is one of PyTorch's, which it never destroys. The id of
// another (torch.cuda.ExternalStream) is its handle. False where this PyTorch cannot tell.
bool is_pytorchs(int device_index, const void* handle) {
  static const auto current =
      reinterpret_cast<StreamGetter>(pytorch_symbol("aoti_torch_get_current_stream"));
  static const auto number = reinterpret_cast<StreamNumber>(pytorch_symbol("aoti_torch_stream_id"));
  static const auto release =
      reinterpret_cast<StreamUse>(pytorch_symbol("aoti_torch_delete_stream"));
  void* stream = nullptr;
  if (current == nullptr || number == nullptr || release == nullptr) return false;
  if (current(device_index, &stream) != 0) return false;
  int64_t id = reinterpret_cast<int64_t>(handle);
  const bool is_known = number(stream, &id) == 0;
  return release(stream) == 0 && is_known && id != reinterpret_cast<int64_t>(handle);
}

// The handles of PyTorch's streams that were current, some of them: asking takes 0.1 us.
constexpr size_t kRemembered = 64;
std::atomic<const void*> g_pytorchs[kRemembered];

bool lasts(int device_index, const void* handle) {
  if (handle == nullptr) return true;  // the default stream
  auto& remembered = g_pytorchs[reinterpret_cast<uintptr_t>(handle) / 64 % kRemembered];
  if (remembered.load(std::memory_order_relaxed) == handle) return true;
  if (!is_pytorchs(device_index, handle)) return false;
  remembered.store(handle, std::memory_order_relaxed);
  return true;
}

}  // namespace

[[gnu::hot]] LaunchStream current_stream(int device_index) {
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
  return {static_cast<CUstream>(stream), lasts(device_index, stream)};
}

CurrentStream current_stream_if_any() {
  return dl_loaded("libtorch_cuda.so") == nullptr ? nullptr : &current_stream;
}

}  // namespace torch_cubin
