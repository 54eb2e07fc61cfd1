// Devices: what the runtime needs to know of each GPU, read once; and the current context.
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
  int shared_optin = 0;        // bytes a block may have with the opt-in
  int64_t l2_bytes = 0;        // of the cache that all multiprocessors share
  double bytes_per_cycle = 0;  // peak of the memory, per cycle of the multiprocessors' top clock
  double cycles_per_microsecond = 1500;  // at that clock
  std::string name;

  // "9.0"
  std::string capability() const { return std::to_string(sm / 10) + "." + std::to_string(sm % 10); }
};

// The device, initialised on first use. Safe from many threads; a failure can be retried.
const Device& device(int index);

int device_count();

// The indices of the GPUs of the name for which a tuned table was measured; throws where there is none.
std::vector<int> devices_of_table(const std::string& gpu);

// The device whose primary context, or a green one of it, is the thread's current one; 0 where the
// thread has none. Throws [driver] for a context of another kind.
int current_device();

// Makes the device's primary context the thread's current one.
void set_current_device(int index);

// Whether the thread's current context is a green one of the device: a part of its multiprocessors
// (torch.cuda.green_contexts), with a default stream of its own.
bool in_green_context(const Device& device);

// One of the streams that mean those of the thread's current context.
bool is_default_stream(CUstream stream);

// The index of the device on which that memory lies; -1 for memory that CUDA does not know.
int device_of_pointer(uint64_t address);

// "13.0": the newest CUDA that the driver serves.
std::string driver_version();

// Makes the device's primary context current for the guard's life. PyTorch's own device guard is
// a no-op when its index is current already, which on a thread that never touched CUDA leaves no
// context at all: autograd's worker threads, for one.
class ContextGuard {
 public:
  explicit ContextGuard(const Device& device);
  // For work on the stream: the default ones of a green context of the device are meant where it is current.
  ContextGuard(const Device& device, CUstream stream);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  void push(const Device& device);

  bool pushed_ = false;
};

}  // namespace torch_cubin
