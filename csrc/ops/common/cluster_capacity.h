// ClusterCapacity: how large clusters a device runs at all, where the driver may give a process few
// multiprocessors (MPS).
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "package/package_kernel.h"

namespace torch_cubin {

// The driver is asked once, of one kernel, whatever was chosen first: plans may not depend on earlier
// ones. (No std::call_once: glibc before 2.34.)
class ClusterCapacity {
 public:
  explicit ClusterCapacity(int64_t most) : largest_(most) {}

  // Blocks of the largest cluster; the most that there can be, until the driver was asked.
  int64_t largest() const { return largest_.load(std::memory_order_relaxed); }

  // The same, asked where it was not. `kernel` takes as much of a multiprocessor as any that may run.
  int64_t ask(PackageKernel& kernel, const Device& device, int64_t dynamic_shared = -1) const {
    std::lock_guard<std::mutex> lock(mutex_);
    int64_t size = largest();
    while (!asked_ && size > 1 && !kernel.has_capacity_for_cluster(size, device, dynamic_shared)) {
      size /= 2;
    }
    largest_.store(size, std::memory_order_relaxed);
    asked_ = true;
    return size;
  }

 private:
  mutable std::mutex mutex_;
  mutable bool asked_ = false;
  mutable std::atomic<int64_t> largest_;
};

}  // namespace torch_cubin
