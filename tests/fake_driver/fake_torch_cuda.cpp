// A stand-in libtorch_cuda.so: the one symbol that the library asks of it, where PyTorch is a CPU
// build. The current stream of device i is 0x5000 + i, or null, the default stream, if so asked.
#include <cstdint>

#define EXPORTED extern "C" __attribute__((visibility("default")))

static bool g_default_streams = false;

EXPORTED void fake_default_streams(int yes) { g_default_streams = yes != 0; }

EXPORTED int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  const auto own = static_cast<uintptr_t>(0x5000 + device);
  *stream = g_default_streams ? nullptr : reinterpret_cast<void*>(own);
  return 0;
}
