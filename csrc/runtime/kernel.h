// Kernel: one kernel of a Module with its parameters and, per device, the state and limits of its
// launches. Independent of tensors: launch.h launches it with plain addresses.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "cubin/image.h"
#include "runtime/device.h"
#include "runtime/loaded_image.h"

namespace torch_cubin {

class Module;

// Limits common to all GPUs (CUDA C++ Programming Guide, "Technical Specifications per Compute
// Capability").
constexpr int64_t kMaxGrid[3] = {2147483647, 65535, 65535};
constexpr int64_t kMaxBlock[3] = {1024, 1024, 64};
constexpr int64_t kMaxThreads = 1024;      // per block
constexpr int64_t kMaxParamBytes = 32764;  // of a kernel's parameters
constexpr int64_t kMaxCluster = 16;        // blocks; more than 8 only if the kernel allows it
constexpr const char* kAxes[3] = {"x", "y", "z"};

class Kernel {
 public:
  // `info` comes from any image with the kernel. Its parameters hold for all of them; its blocks,
  // clusters and shared memory only if the images agree.
  Kernel(Module& module, KernelInfo info);
  ~Kernel() { forget(); }
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  // The maximal number of co-resident blocks for a launch shape (cooperative grids and clusters).
  struct Residency {
    CUlaunchConfig config{};
    uint32_t cluster[3] = {0, 0, 0};
    int64_t blocks = -1;
  };

  // The kernel on one device.
  struct OnDevice {
    OnDevice(std::shared_ptr<const LoadedImage> image, const std::string& name,
             const Device& device);

    // The function, with its dynamic shared memory limit at or above the given bytes. The limit is
    // only raised, so that a small launch cannot lower it under a concurrent larger one. Throws
    // [launch] for more than a block may have.
    CUfunction ready(uint32_t dynamic_shared) {
      return allows(dynamic_shared) ? function : raise_limit(dynamic_shared);
    }
    bool allows(uint32_t dynamic_shared) const {
      return shared_limit.load(std::memory_order_acquire) > dynamic_shared;
    }

    // The members that every launch reads come first.
    std::atomic<uint32_t> shared_limit{0};  // dynamic bytes allowed + 1; 0: not queried yet
    bool has_cluster = false;               // compiled into the binary
    bool grid_in_clusters = false;          // a launch's grid counts clusters
    // Cached because launching a CUkernel makes the driver look it up on every launch (50 ns).
    CUfunction function = nullptr;
    CUcontext context = nullptr;  // the device's
    // Limits of the fast path: the maximal threads per block and, if common_block[0] is not 0, the
    // only block.
    int64_t common_threads = 0;
    int64_t common_block[3] = {0, 0, 0};
    uint64_t least_shared = 0;  // dynamic bytes; 1 if the kernel requires some
    // Packed cluster shapes that are known to fit, hashed to a slot each; 0 if empty.
    mutable std::atomic<uint64_t> checked_clusters[4] = {};
    std::atomic<uint64_t>& checked_cluster(uint64_t packed) const {
      return checked_clusters[(packed * 0x9E3779B97F4A7C15u) >> 62];
    }

    const Device& device;
    std::shared_ptr<const LoadedImage> image;
    const KernelInfo& info;  // of this device's image
    CUkernel handle = nullptr;
    int max_threads = 0;  // per block; registers may allow fewer than 1024

    std::mutex mutex;             // guards the following members
    Residency residency;          // of the last shape queried
    bool large_clusters = false;  // more than 8 blocks were requested and allowed
    int priorities[2] = {1, 0};   // greatest (a lower number) and least; not queried yet

   private:
    CUfunction raise_limit(uint32_t dynamic_shared);
    std::string object() const;
    std::mutex limit_mutex_;  // guards raise_limit()
  };

  Module& module() const { return module_; }
  const std::string& name() const { return info_.name; }
  const KernelInfo& info() const { return info_; }
  const char* lasting_name() const { return lasting_name_; }  // for note_launch()

  // The facts that launches on the device are checked against. Does not initialise the device if
  // all images agree.
  const KernelInfo& info_on(int32_t device_index) const;

  // Loads the kernel on its first use on a device, whose context must be current. Throws [arch] if
  // no image runs there, [no_kernel], and the driver's errors.
  OnDevice& on(const Device& device) {
    OnDevice* ready = find(device.index);
    return ready != nullptr ? *ready : load(device);
  }

  // Null until on() was called for the device.
  OnDevice* find(int device_index) const {
    return on_[device_index].load(std::memory_order_acquire);
  }

  // The device of the last launch that took its device from the current context; or null.
  OnDevice* last() const { return last_.load(std::memory_order_acquire); }
  void remember(OnDevice& here) { last_.store(&here, std::memory_order_release); }

  // Loads the code onto the device now instead of at the first launch.
  void preload(const Device& device);

  // Frees the state that on() allocated. No launch may be running.
  void forget();

 private:
  OnDevice& load(const Device& device);

  Module& module_;  // owns this kernel
  KernelInfo info_;
  const char* const lasting_name_;
  bool same_shape_;   // all images agree on the facts that launches are checked against
  std::mutex mutex_;  // guards load()
  std::atomic<OnDevice*> on_[kMaxDevices] = {};
  std::atomic<OnDevice*> last_{nullptr};
};

}  // namespace torch_cubin
