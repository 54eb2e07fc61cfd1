// DeviceTables: one object for each device, built on first use.
#pragma once

#include <atomic>
#include <mutex>

#include "runtime/device.h"

namespace torch_cubin {

// Thread-safe; a failed build is retried by the next call. The tables are leaked on purpose, like
// the catalog's kernels.
template <class Table>
class DeviceTables {
 public:
  const Table& get(const Device& device) {
    return get(device, [](const Device& device) { return new Table(device); });
  }

  // build(device) returns a new Table; it is called once for each device.
  template <class Build>
  const Table& get(const Device& device, Build&& build) {
    const Table* table = tables_[device.index].load(std::memory_order_acquire);
    if (table != nullptr) return *table;
    std::lock_guard<std::mutex> lock(mutex_);
    table = tables_[device.index].load(std::memory_order_relaxed);
    if (table == nullptr) {
      table = build(device);
      tables_[device.index].store(table, std::memory_order_release);
    }
    return *table;
  }

 private:
  std::atomic<const Table*> tables_[kMaxDevices] = {};
  std::mutex mutex_;  // guards the creation of entries
};

}  // namespace torch_cubin
