#include "runtime/device.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>

#include "cubin/error.h"

namespace torch_cubin {
namespace {

std::atomic<const Device*> g_devices[kMaxDevices];  // never freed: launches may run at exit
std::mutex g_devices_mutex;                         // guards the creation of entries

int attribute(CUdevice handle, CUdevice_attribute which) {
  int value = 0;
  check(driver().cuDeviceGetAttribute(&value, which, handle), "driver", "cuDeviceGetAttribute");
  return value;
}

const Device* open_device(int index) {
  const Driver& d = driver();
  auto device = std::make_unique<Device>();
  device->index = index;
  const int count = device_count();
  if (index < 0 || index >= count) {
    fail({"no_device", "cuda:" + std::to_string(index), "does not exist",
          "an index below " + std::to_string(count), std::to_string(index),
          "Check CUDA_VISIBLE_DEVICES."});
  }
  check(d.cuDeviceGet(&device->handle, index), "no_device",
        "cuDeviceGet of cuda:" + std::to_string(index));
  char name[128] = "";
  check(d.cuDeviceGetName(name, sizeof(name), device->handle), "driver", "cuDeviceGetName");
  device->name = name;
  device->sm = 10 * attribute(device->handle, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
               attribute(device->handle, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  device->multiprocessors = attribute(device->handle, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  device->shared_optin =
      attribute(device->handle, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  device->l2_bytes = attribute(device->handle, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
  // Double data rate: two transfers per clock. Both clocks are in kHz.
  const double memory = 2.0 * attribute(device->handle, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE) *
                        attribute(device->handle, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH) / 8;
  const int clock = attribute(device->handle, CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
  // Virtual and integrated GPUs may report 0; the cost model then uses a typical value.
  device->bytes_per_cycle = memory > 0 && clock > 0 ? memory / clock : 1000;
  if (clock > 0) device->cycles_per_microsecond = clock / 1000.0;
  check(d.cuDevicePrimaryCtxRetain(&device->context, device->handle), "driver",
        "cuDevicePrimaryCtxRetain of cuda:" + std::to_string(index));
  return device.release();
}

}  // namespace

const Device& device(int index) {
  if (index >= 0 && index < kMaxDevices) {
    const Device* ready = g_devices[index].load(std::memory_order_acquire);
    if (ready != nullptr) return *ready;
  } else {
    fail({"no_device", "cuda:" + std::to_string(index), "is out of range",
          "an index from 0 to " + std::to_string(kMaxDevices - 1), std::to_string(index), ""});
  }
  refuse_forked();
  std::lock_guard<std::mutex> lock(g_devices_mutex);
  const Device* ready = g_devices[index].load(std::memory_order_relaxed);
  if (ready == nullptr) {
    ready = open_device(index);
    g_devices[index].store(ready, std::memory_order_release);
  }
  return *ready;
}

int device_count() {
  int count = 0;
  check(driver().cuDeviceGetCount(&count), "driver", "cuDeviceGetCount");
  return count;
}

std::vector<int> devices_of_table(const std::string& gpu) {
  const int count = device_count();
  std::vector<int> devices;
  for (int i = 0; i < count; ++i) {
    if (device(i).name == gpu) devices.push_back(i);
  }
  if (devices.empty()) {
    fail({"input", "a tuned table", "was measured on a GPU that this process does not have",
          count > 0 ? device(0).name : "a GPU", printable(gpu), "Tune on this GPU."});
  }
  return devices;
}

int current_device() {
  const Driver& d = driver();
  CUcontext current = nullptr;
  check(d.cuCtxGetCurrent(&current), "driver", "cuCtxGetCurrent");
  if (current == nullptr) return 0;
  CUdevice handle = 0;
  check(d.cuCtxGetDevice(&handle), "driver", "cuCtxGetDevice");
  const int count = std::min(device_count(), kMaxDevices);
  for (int i = 0; i < count; ++i) {
    // Compares the handle first: device(i) would create the context of an unused device.
    CUdevice other = 0;
    check(d.cuDeviceGet(&other, i), "driver", "cuDeviceGet");
    if (other != handle) continue;
    const Device& found = device(i);
    if (found.context == current || in_green_context(found)) return i;
  }
  fail({"driver", "the thread's current CUDA context", "is not its device's primary one",
        "what cudaSetDevice or cuDevicePrimaryCtxRetain gives, or a green one of it",
        "a context of another kind",
        "Say on which device to launch, or make the primary context current."});
}

void set_current_device(int index) {
  check(driver().cuCtxSetCurrent(device(index).context), "driver",
        "cuCtxSetCurrent of cuda:" + std::to_string(index));
}

bool in_green_context(const Device& device) {
  const Driver& d = driver();
  if (d.cuStreamGetGreenCtx == nullptr) return false;
  CUcontext current = nullptr;
  check(d.cuCtxGetCurrent(&current), "driver", "cuCtxGetCurrent");
  if (current == nullptr || current == device.context) return false;
  // For the null stream this returns the current context if it is a green one.
  void* green = nullptr;
  CUdevice handle = 0;
  return d.cuStreamGetGreenCtx(nullptr, &green) == CUDA_SUCCESS && green != nullptr &&
         d.cuCtxGetDevice(&handle) == CUDA_SUCCESS && handle == device.handle;
}

uint64_t capture_of(const Device& device, CUstream stream) {
  if (stream == nullptr) return 0;  // the legacy default stream cannot be captured
  const ContextGuard guard(device, stream);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t number = 0;
  check(driver().capture_info(stream, &status, &number, nullptr, nullptr, nullptr), "capture",
        "cuStreamGetCaptureInfo");
  return status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? number : 0;
}

int device_of_pointer(uint64_t address) {
  int ordinal = -1;
  const CUresult result = driver().cuPointerGetAttribute(
      &ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, static_cast<CUdeviceptr>(address));
  if (result == CUDA_ERROR_INVALID_VALUE) return -1;
  check(result, "driver", "cuPointerGetAttribute");
  return ordinal;
}

std::string driver_version() {
  const int version = driver().version;
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

bool is_default_stream(CUstream stream) {
  return stream == nullptr || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
}

ContextGuard::ContextGuard(const Device& device) { push(device); }

ContextGuard::ContextGuard(const Device& device, CUstream stream) {
  if (!is_default_stream(stream) || !in_green_context(device)) push(device);
}

void ContextGuard::push(const Device& device) {
  const Driver& d = driver();
  CUcontext current = nullptr;
  check(d.cuCtxGetCurrent(&current), "driver", "cuCtxGetCurrent");
  if (current == device.context) return;
  check(d.cuCtxPushCurrent(device.context), "driver", "cuCtxPushCurrent");
  pushed_ = true;
}

ContextGuard::~ContextGuard() {
  if (!pushed_) return;
  CUcontext popped = nullptr;
  ignore_in_destructor(driver().cuCtxPopCurrent(&popped));
}

}  // namespace torch_cubin
