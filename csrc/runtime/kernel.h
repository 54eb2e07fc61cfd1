// Kernel: one kernel of a Module: its parameters, and on each device what its launches need and are
// checked against. Knows no tensor: launch.h launches it with plain addresses.
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

// Limits that are the same on every GPU (CUDA C++ Programming Guide, "Technical Specifications per
// Compute Capability").
constexpr int64_t kMaxGrid[3] = {2147483647, 65535, 65535};
constexpr int64_t kMaxBlock[3] = {1024, 1024, 64};
constexpr int64_t kMaxThreads = 1024;      // a block
constexpr int64_t kMaxParamBytes = 32764;  // of a kernel's parameters
constexpr int64_t kMaxCluster = 16;        // blocks; more than 8 where the kernel allows it
constexpr const char* kAxes[3] = {"x", "y", "z"};

class Kernel {
 public:
  // `info` is of any image that has the kernel: its parameters are those of all of them, its
  // blocks, clusters and shared memory only where they agree.
  Kernel(Module& module, KernelInfo info);
  ~Kernel() { forget(); }
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  // The most blocks that can run at once of a launch of that shape: cooperative grids and clusters.
  struct Residency {
    CUlaunchConfig config{};
    uint32_t cluster[3] = {0, 0, 0};
    int64_t blocks = -1;
  };

  // The kernel on one device.
  struct OnDevice {
    OnDevice(std::shared_ptr<const LoadedImage> image, const std::string& name,
             const Device& device);

    // The function, ready to be launched with that much dynamic shared memory. The limit is only
    // ever raised, so a small launch never lowers it under a concurrent large one. Throws [launch]
    // for more than a block may have.
    CUfunction ready(uint32_t dynamic_shared) {
      return allows(dynamic_shared) ? function : raise_limit(dynamic_shared);
    }
    bool allows(uint32_t dynamic_shared) const {
      return shared_limit.load(std::memory_order_acquire) > dynamic_shared;
    }

    // The members that every launch reads stand first.
    std::atomic<uint32_t> shared_limit{0};  // dynamic bytes allowed + 1; 0: not asked yet
    bool has_cluster = false;               // the binary demands one
    bool grid_in_clusters = false;          // and a launch's grid counts those
    // A CUkernel may be launched too, but the driver then looks this up on every launch (50 ns).
    CUfunction function = nullptr;
    CUcontext context = nullptr;  // the device's
    // Of a launch whose shape needs no further check: at most so many threads a block, and where
    // common_block[0] is not 0, that block.
    int64_t common_threads = 0;
    int64_t common_block[3] = {0, 0, 0};
    uint64_t least_shared = 0;  // dynamic bytes, 1 where the kernel cannot do without
    // Shapes with clusters that were found to fit, packed, each in the slot that its number says;
    // or 0.
    mutable std::atomic<uint64_t> checked_clusters[4] = {};
    std::atomic<uint64_t>& checked_cluster(uint64_t packed) const {
      return checked_clusters[(packed * 0x9E3779B97F4A7C15u) >> 62];
    }

    const Device& device;
    std::shared_ptr<const LoadedImage> image;
    const KernelInfo& info;  // of that image
    CUkernel handle = nullptr;
    int max_threads = 0;  // a block; registers may allow fewer than 1024

    std::mutex mutex;             // guards what follows
    Residency residency;          // of the last shape asked for
    bool large_clusters = false;  // more than 8 blocks were asked for, and allowed
    int priorities[2] = {1, 0};   // greatest (a lower number) and least; unknown at first

   private:
    CUfunction raise_limit(uint32_t dynamic_shared);
    std::string object() const;
    std::mutex limit_mutex_;  // guards raise_limit()
  };

  Module& module() const { return module_; }
  const std::string& name() const { return info_.name; }
  const KernelInfo& info() const { return info_; }
  const char* lasting_name() const { return lasting_name_; }  // for note_launch()

  // What launches on that device are checked against, without touching it where that is the same
  // everywhere.
  const KernelInfo& info_on(int32_t device_index) const;

  // Loads the kernel on its first use on a device, whose context is current. Throws [arch] where
  // no image runs there, [no_kernel], and what the driver says.
  OnDevice& on(const Device& device) {
    OnDevice* ready = find(device.index);
    return ready != nullptr ? *ready : load(device);
  }

  // Null before on() was called for the device.
  OnDevice* find(int device_index) const {
    return on_[device_index].load(std::memory_order_acquire);
  }

  // The device of the last launch that found its device by the current context; or null.
  OnDevice* last() const { return last_.load(std::memory_order_acquire); }
  void remember(OnDevice& here) { last_.store(&here, std::memory_order_release); }

  // Loads the code onto the device now, rather than at the first launch.
  void preload(const Device& device);

  // Frees what on() allocated; no launch may be under way.
  void forget();

 private:
  OnDevice& load(const Device& device);

  Module& module_;  // owns this kernel
  KernelInfo info_;
  const char* const lasting_name_;
  bool
      same_shape_;  // all images that have the kernel say the same of what launches are checked against
  std::mutex mutex_;  // guards load()
  std::atomic<OnDevice*> on_[kMaxDevices] = {};
  std::atomic<OnDevice*> last_{nullptr};
};

}  // namespace torch_cubin
