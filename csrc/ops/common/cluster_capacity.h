// How many clusters of a size run at a time, and ClusterCapacity: the largest cluster that the
// device can run in this process (under MPS a process may have few multiprocessors).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "package/package_kernel.h"

namespace torch_cubin {

// Clusters of so many blocks, one a multiprocessor, that run at a time. Multiprocessors come in
// groups of 16 or 18, some smaller, and a cluster lies within one: of four there are 30 of 33 on an
// H200, and 15 of 16 of eight.
constexpr int64_t clusters_at_once(int64_t multiprocessors, int64_t size) {
  constexpr int64_t kGroup = 16, kOf = 11, kFound = 10;
  if (size <= 2) return multiprocessors / size;
  return multiprocessors * kFound * (kGroup / size) / (kOf * kGroup);
}

// Queried once, for a fixed kernel, so that plans do not depend on earlier plans. (std::call_once
// would need glibc 2.34.)
class ClusterCapacity {
 public:
  explicit ClusterCapacity(int64_t most) : largest_(most) {}

  // Blocks of the largest cluster; the architecture's maximum before ask().
  int64_t largest() const { return largest_.load(std::memory_order_relaxed); }

  // The same after querying the driver. `kernel` must use as much of a multiprocessor as any other.
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

  // The same for the kernel of a table's rows that has the most shared memory.
  template <typename Row>
  int64_t ask_largest(const std::vector<Row>& rows, const Device& device) const {
    const auto largest = std::max_element(rows.begin(), rows.end(), [](auto& x, auto& y) {
      return x.kernel->entry().dynamic_shared < y.kernel->entry().dynamic_shared;
    });
    return ask(*largest->kernel, device);
  }

 private:
  mutable std::mutex mutex_;
  mutable bool asked_ = false;
  mutable std::atomic<int64_t> largest_;
};

}  // namespace torch_cubin
