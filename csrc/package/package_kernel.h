// PackageKernel: one kernel of a package: its manifest entry, and from its first use on the loaded
// kernel. Who fills the parameters, the package does not know.
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

// What every entry says, whatever the kernel computes.
struct KernelEntry {
  std::string name, family, kind, arch, file, sha256, symbol;
  uint32_t block[3] = {1, 1, 1};
  uint32_t cluster[3] = {1, 1, 1};
  uint32_t dynamic_shared = 0;
  std::vector<ParamInfo> params;
  std::string params_digest;  // of the header that declares the parameters; "" where none is given
  Arch parsed_arch;
};

// Blocks of a launch.
struct Grid {
  int64_t x = 1, y = 1, z = 1;
  int64_t cluster_x = 0;        // of which so many along x make a cluster; 0: the entry's cluster
  int64_t dynamic_shared = -1;  // bytes of a block; -1: the entry's
};

class PackageKernel {
 public:
  // Throws std::exception for an entry that is malformed.
  PackageKernel(const nlohmann::json& entry, std::shared_ptr<const PackageFiles> files);
  ~PackageKernel();
  PackageKernel(const PackageKernel&) = delete;
  PackageKernel& operator=(const PackageKernel&) = delete;

  const KernelEntry& entry() const { return entry_; }

  // The whole entry, with the fields that only the kernel's host code understands: tiles, costs,
  // swizzles, tuned tables.
  const nlohmann::json& fields() const { return *fields_; }

  // Reads, hashes, parses and loads the cubin on the first call; safe from many threads, and a
  // failure can be retried. Throws [file], [hash], [image], [params] or what the driver says.
  Kernel& kernel() {
    Kernel* kernel = kernel_.load(std::memory_order_acquire);
    return kernel != nullptr ? *kernel : load();
  }

  // Launches it with the entry's block, cluster and shared memory. `params` is its one parameter.
  // With `overlap` its blocks may start while the last ones of the kernel before it in the stream
  // are running, where the device can: the kernel waits itself (griddepcontrol.wait).
  void launch(const Grid& grid, const Device& device, const void* params,
              CurrentStream current_stream, bool overlap = true);

  // Whether clusters of so many blocks along x run on the device at all, where the driver may
  // give a process few multiprocessors (MPS). Loads the kernel. `dynamic_shared` is as a grid's.
  bool has_capacity_for_cluster(int64_t blocks, const Device& device, int64_t dynamic_shared = -1);

  bool loaded() const { return kernel_.load(std::memory_order_acquire) != nullptr; }

 private:
  Kernel& load();

  KernelEntry entry_;
  std::unique_ptr<const nlohmann::json> fields_;
  std::shared_ptr<const PackageFiles> files_;
  std::mutex mutex_;  // guards load()
  // Its module is leaked on purpose: graphs may hold it until exit.
  std::atomic<Kernel*> kernel_{nullptr};
};

}  // namespace torch_cubin
