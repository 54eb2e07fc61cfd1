#include "runtime/memory.h"

#include <string>

namespace torch_cubin {
namespace {

std::string place(const Device& device) { return " on cuda:" + std::to_string(device.index); }

CUdeviceptr driver_address(const void* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

}  // namespace

void* allocate_memory(const Device& device, uint64_t bytes) {
  const ContextGuard guard(device);
  CUdeviceptr address = 0;
  check(driver().cuMemAlloc(&address, bytes == 0 ? 1 : bytes), "driver",
        "cuMemAlloc of " + std::to_string(bytes) + " bytes" + place(device));
  return reinterpret_cast<void*>(address);
}

void free_memory(const Device& device, void* memory) {
  if (memory == nullptr) return;
  const ContextGuard guard(device);
  check(driver().cuMemFree(driver_address(memory)), "driver", "cuMemFree" + place(device));
}

void copy_memory(const Device& device, void* to, const void* from, uint64_t bytes, void* stream) {
  if (bytes == 0) return;
  const ContextGuard guard(device, static_cast<CUstream>(stream));
  check(driver().cuMemcpyAsync(driver_address(to), driver_address(from), bytes,
                               static_cast<CUstream>(stream)),
        "driver", "cuMemcpyAsync of " + std::to_string(bytes) + " bytes" + place(device));
}

void synchronize_stream(const Device& device, void* stream) {
  const ContextGuard guard(device, static_cast<CUstream>(stream));
  check(driver().cuStreamSynchronize(static_cast<CUstream>(stream)), "driver",
        "cuStreamSynchronize" + place(device));
}

}  // namespace torch_cubin
