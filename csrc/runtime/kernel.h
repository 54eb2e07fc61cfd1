// Module: an Image given to the driver. Kernel: one entry of it, with what a launch on each device
// needs. Loading is lazy and per process; one library handle serves all devices.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cubin/image.h"
#include "runtime/device.h"

namespace torch_cubin {

class Module {
 public:
  // Gives `bytes`, of which `image` tells the facts, to the driver. The bytes must have been
  // parsed and hashed already: the driver takes no length and walks off the end of a bad image.
  static std::shared_ptr<const Module> load(Image image, const std::vector<uint8_t>& bytes,
                                            const std::string& origin);

  // The same for PTX, which the driver compiles: `text` ends with a NUL. What the compiler says
  // stands in the error.
  static std::shared_ptr<const Module> compile(Image image, const std::vector<uint8_t>& text,
                                               const std::string& origin);

  // Gives the library back to the driver now, with its errors told. The caller has waited for the
  // work that uses it; a second call does nothing.
  void unload() const;
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  const Image& image() const { return image_; }
  const std::string& origin() const { return origin_; }
  CUlibrary handle() const { return handle_; }
  bool is_compiled() const { return compiled_; }  // from PTX, for whatever device runs it

 private:
  Module(Image image, std::string origin) : image_(std::move(image)), origin_(std::move(origin)) {}
  Image image_;
  std::string origin_;  // for errors: "cubin 'sm_90a/x.cubin'"
  mutable CUlibrary handle_ = nullptr;
  bool compiled_ = false;
};

class Kernel {
 public:
  // Throws [no_kernel] if the module has no such entry.
  Kernel(std::shared_ptr<const Module> module, const std::string& name);

  const std::string& name() const { return info_.name; }
  const KernelInfo& info() const { return info_; }
  const Module& module() const { return *module_; }

  // The function, ready to be launched on `device`, whose context is current, with that much
  // dynamic shared memory. The first call for a device checks the arch; the limit of dynamic shared
  // memory is only ever raised, so a small launch never lowers it under a concurrent large one.
  CUfunction ready(const Device& device, uint32_t dynamic_shared) {
    const CUfunction function = find_ready(device.index, dynamic_shared);
    return function != nullptr ? function : prepare(device, dynamic_shared);
  }

  // The same where ready() was called for as much before, else null.
  CUfunction find_ready(int device_index, uint32_t dynamic_shared) const {
    if (limit_[device_index].load(std::memory_order_acquire) <= dynamic_shared) return nullptr;
    return functions_[device_index].load(std::memory_order_relaxed);
  }

  // The driver's handle for all devices; null before ready().
  CUkernel handle() const { return handle_.load(std::memory_order_relaxed); }

 private:
  CUfunction prepare(const Device& device, uint32_t dynamic_shared);

  std::shared_ptr<const Module> module_;
  KernelInfo info_;
  std::mutex mutex_;  // guards prepare()
  std::atomic<CUkernel> handle_{nullptr};
  // A CUkernel may be launched too, but the driver then looks this up on every launch (50 ns).
  std::atomic<CUfunction> functions_[kMaxDevices] = {};
  std::atomic<uint32_t> limit_[kMaxDevices]{};  // dynamic shared bytes allowed + 1; 0: not prepared
};

// The same on every GPU (CUDA C++ Programming Guide, "Technical Specifications per Compute
// Capability").
constexpr int64_t kMaxGrid[3] = {2147483647, 65535, 65535};
constexpr int64_t kMaxBlock[3] = {1024, 1024, 64};
constexpr int64_t kMaxThreads = 1024;  // a block
constexpr int64_t kMaxCluster = 16;    // blocks; more than 8 where the kernel allows it
constexpr const char* kAxes[3] = {"x", "y", "z"};

struct LaunchConfig {
  uint32_t grid[3] = {1, 1, 1};
  uint32_t block[3] = {1, 1, 1};
  uint32_t cluster[3] = {1, 1, 1};
  uint32_t dynamic_shared = 0;
  // The kernel waits itself for the one before it in the stream (griddepcontrol.wait), so its
  // blocks may come while that one's last are running. Ignored below sm_90.
  bool waits_itself = false;
};

// Launches on the device's current PyTorch stream. `params` holds one pointer a parameter; the
// caller has compared its parameters with the kernel's when it made its table. Throws [launch] for a
// grid that is no whole number of the kernel's clusters.
void launch(Kernel& kernel, const LaunchConfig& config, const Device& device, void** params);

// Kernels launched by this process so far.
int64_t launch_count();
void count_launch();

}  // namespace torch_cubin
