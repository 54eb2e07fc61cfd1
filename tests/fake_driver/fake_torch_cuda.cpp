// A stand-in libtorch_cuda.so: the one symbol that the library asks of it, where PyTorch is a CPU
// build. The current stream of device i is 0x5000 + i.
#include <cstdint>

extern "C" __attribute__((visibility("default"))) int32_t
aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = reinterpret_cast<void*>(static_cast<uintptr_t>(0x5000 + device));
  return 0;
}
