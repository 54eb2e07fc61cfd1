// What the kernel tables of all built-in families share: one table a device, made of the catalog on
// first use; and the checks of the entries that it is made of.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "cubin/error.h"
#include "package/catalog.h"
#include "runtime/device.h"

namespace torch_cubin {

// Tables by device. Safe from many threads; a failed build can be retried. The tables are leaked on
// purpose, as the catalog is.
template <class Table>
class FamilyTables {
 public:
  // build(device) returns a new Table; it is called once a device.
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
  std::mutex mutex_;  // guards the making of entries
};

// Index of a manifest field's value among the names that a family knows. Throws [internal].
template <size_t N>
int index_of(const std::string& text, const char* const (&names)[N], const char* field,
             const CatalogEntry& entry) {
  for (size_t i = 0; i < N; ++i) {
    if (text == names[i]) return static_cast<int>(i);
  }
  fail({"internal", "catalog kernel '" + entry.name + "'",
        std::string("has a ") + field + " that the " + entry.family + " family does not know", "",
        text, "Build the library and its kernels from one source tree."});
}

// Built-in kernels take one struct by value, of `bytes`; catalog.cpp compares a manifest with its
// cubins. Throws [params].
void check_one_parameter(const CatalogEntry& entry, size_t bytes);

}  // namespace torch_cubin
