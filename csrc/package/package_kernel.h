// PackageKernel: one kernel of a package: its manifest entry and, after its first use, the loaded
// kernel. Independent of the code that fills the parameters.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "cubin/image.h"
#include "package/package_files.h"
#include "runtime/launch.h"

namespace torch_cubin {

// The fields common to all entries.
struct KernelEntry {
  std::string name, family, kind, arch, file, sha256, symbol;
  uint32_t block[3] = {1, 1, 1};
  uint32_t cluster[3] = {1, 1, 1};
  uint32_t dynamic_shared = 0;
  std::vector<ParamInfo> params;
  // The header that declares the parameters, as check_params() names it, and its digest; "" if
  // absent.
  std::string params_header, params_digest;
  Arch parsed_arch;
};

// A launch's blocks.
struct Grid {
  int64_t x = 1, y = 1, z = 1;
  int64_t cluster_x = 0;        // blocks per cluster along x; 0: the entry's cluster
  int64_t dynamic_shared = -1;  // bytes per block; -1: the entry's
  int64_t block_x = 0;          // threads of a block along x; 0: the entry's
};

class PackageKernel {
 public:
  // Throws std::exception for a malformed entry.
  PackageKernel(const nlohmann::json& entry, std::shared_ptr<const PackageFiles> files);
  ~PackageKernel();
  PackageKernel(const PackageKernel&) = delete;
  PackageKernel& operator=(const PackageKernel&) = delete;

  const KernelEntry& entry() const { return entry_; }

  // The whole entry, including the fields that only the kernel's host code understands: tiles,
  // costs, swizzles, tuned tables.
  const nlohmann::json& fields() const { return *fields_; }

  // Reads, hashes, parses and loads the cubin on the first call. Thread-safe; a failure can be
  // retried. Throws [file], [hash], [image], [params], and the driver's errors.
  Kernel& kernel() {
    Kernel* kernel = kernel_.load(std::memory_order_acquire);
    return kernel != nullptr ? *kernel : load();
  }

  // Launches the kernel with the entry's block, cluster and shared memory. `params` is its only
  // parameter. With `overlap` its blocks may start, if the device supports it, while the preceding
  // kernel of the stream is finishing; the kernel must wait itself (griddepcontrol.wait).
  void launch(const Grid& grid, const Device& device, const void* params,
              CurrentStream current_stream, bool overlap = true);

  // Whether clusters of `blocks` blocks along x fit on the device, where MPS may limit a process to
  // few multiprocessors. Loads the kernel. `dynamic_shared` is as in Grid.
  bool has_capacity_for_cluster(int64_t blocks, const Device& device, int64_t dynamic_shared = -1);

  // The cubin, verified by its sha256. Throws [file], [hash], [image].
  std::vector<uint8_t> cubin() const;

  bool loaded() const { return kernel_.load(std::memory_order_acquire) != nullptr; }

 private:
  Kernel& load();

  KernelEntry entry_;
  std::unique_ptr<const nlohmann::json> fields_;
  std::shared_ptr<const PackageFiles> files_;
  std::mutex mutex_;  // guards load()
  // Its module is never freed: graphs may use it until exit.
  std::atomic<Kernel*> kernel_{nullptr};
};

}  // namespace torch_cubin
