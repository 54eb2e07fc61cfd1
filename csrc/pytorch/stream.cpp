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

using GetStream = int32_t (*)(int32_t device_index, void** stream);
using GetStreamId = int32_t (*)(void* stream, int64_t* id);
using DeleteStream = int32_t (*)(void* stream);
std::atomic<GetStream> g_getter{nullptr};

GetStream find_getter() {
  void* library = dl_loaded("libtorch_cuda.so");
  void* symbol =
      library != nullptr ? pytorch_symbol("aoti_torch_get_current_cuda_stream") : nullptr;
  if (symbol == nullptr) {
    fail({"driver", "PyTorch", "has no CUDA stream to give", "a CUDA build of torch",
          library == nullptr ? "one without libtorch_cuda.so"
                             : "one without aoti_torch_get_current_cuda_stream",
          "Install a CUDA build of torch 2.11 or newer."});
  }
  return reinterpret_cast<GetStream>(symbol);
}

// Whether PyTorch made the current stream of a device, and so never destroys it. Another stream
// (torch.cuda.ExternalStream) has its handle as its id. False where this PyTorch cannot tell.
bool is_pytorchs(int device_index, const void* handle) {
  static const auto get_stream =
      reinterpret_cast<GetStream>(pytorch_symbol("aoti_torch_get_current_stream"));
  static const auto get_id = reinterpret_cast<GetStreamId>(pytorch_symbol("aoti_torch_stream_id"));
  static const auto delete_stream =
      reinterpret_cast<DeleteStream>(pytorch_symbol("aoti_torch_delete_stream"));
  if (get_stream == nullptr || get_id == nullptr || delete_stream == nullptr) return false;
  void* stream = nullptr;
  if (get_stream(device_index, &stream) != 0) return false;
  const auto id_of_others = reinterpret_cast<int64_t>(handle);
  int64_t id = id_of_others;
  const bool has_id = get_id(stream, &id) == 0;
  return delete_stream(stream) == 0 && has_id && id != id_of_others;
}

// The handles of PyTorch's streams that were current, some of them: asking takes 0.15 us.
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
  GetStream getter = g_getter.load(std::memory_order_acquire);
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
