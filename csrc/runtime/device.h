// Device: the properties of each GPU that the runtime needs, read once; and the current context.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "driver/driver.h"

namespace torch_cubin {

constexpr int kMaxDevices = 64;

struct Device {
  int index = 0;  // PyTorch's index, which is the driver's ordinal
  CUdevice handle = 0;
  CUcontext context = nullptr;  // the primary context, retained for the life of the process
  int sm = 0;                   // 90 for compute capability 9.0
  int multiprocessors = 0;
  int shared_optin = 0;                  // maximal bytes per block, with opt-in
  int64_t l2_bytes = 0;                  // size of the L2 cache
  double bytes_per_cycle = 0;            // peak memory bandwidth, per cycle of the maximal SM clock
  double cycles_per_microsecond = 1500;  // at that clock
  std::string name;

  // "9.0"
  std::string capability() const { return std::to_string(sm / 10) + "." + std::to_string(sm % 10); }
};

// The device, initialised on first use. Thread-safe; a failure can be retried.
const Device& device(int index);

int device_count();

// The indices of the GPUs with the name that a tuned table was measured on. Throws if there is
// none.
std::vector<int> devices_of_table(const std::string& gpu);

// The device of the thread's current context, a primary or green one; 0 if there is none. Throws
// [driver] for a context of another kind.
int current_device();

// Makes the device's primary context the thread's current one.
void set_current_device(int index);

// Whether the thread's current context is a green context of the device: a subset of its
// multiprocessors (torch.cuda.green_contexts) with its own default stream.
bool in_green_context(const Device& device);

// Whether the handle is a default stream, which belongs to the thread's current context.
bool is_default_stream(CUstream stream);

// The number of the capture of a CUDA graph that records the stream; 0 if none does.
uint64_t capture_of(const Device& device, CUstream stream);

// The index of the device that owns the memory; -1 for memory that CUDA does not know.
int device_of_pointer(uint64_t address);

// "13.0": the newest CUDA version that the driver supports.
std::string driver_version();

// Makes the device's primary context current for the guard's lifetime. PyTorch's device guard does
// nothing if its index is current already, so a thread that has not used CUDA, such as one of
// autograd's, would have no context.
class ContextGuard {
 public:
  explicit ContextGuard(const Device& device);
  // For work on a stream. For a default stream, keeps a current green context of the device.
  ContextGuard(const Device& device, CUstream stream);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  void push(const Device& device);

  bool pushed_ = false;
};

}  // namespace torch_cubin
