// The catalog: the package of kernels that ships with the library. A folder with manifest.json and
// one cubin a kernel and arch; see csrc/kernels/README.md for the fields.
//
// Knows no op by name: what a family means, its op says.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "cubin/image.h"
#include "runtime/kernel.h"

namespace torch_cubin {

// One manifest entry, as written there.
struct CatalogEntry {
  std::string name, family, kind, arch, file, sha256, symbol;
  std::string math, layout;
  int alignment = 0;  // bytes
  int tile[3] = {0, 0, 0};
  uint32_t block[3] = {1, 1, 1};
  uint32_t cluster[3] = {1, 1, 1};
  uint32_t dynamic_shared = 0;
  int blocks_per_multiprocessor = 1;
  double cost_k_tile = 0;  // cycles of one block per k tile
  double cost_fixed = 0;   // cycles of one block outside the k loop
  double cost_lone = 0.5;  // share of cost_k_tile that a block alone on its multiprocessor needs
  std::vector<ParamInfo> params;
  std::string params_digest;  // of the header that declares the family's parameters
  Arch parsed_arch;
};

// An entry and, from its first use on, its loaded kernel.
class CatalogKernel {
 public:
  CatalogKernel(CatalogEntry entry, std::string folder)
      : entry_(std::move(entry)), folder_(std::move(folder)) {}
  const CatalogEntry& entry() const { return entry_; }

  // Throws [params] unless the kernel and this library were built from one declaration of the
  // family's parameters: two structs of one size are told apart by nothing else.
  void check_params_digest() const;

  // Reads, hashes, parses and loads the cubin on the first call; safe from many threads, and a
  // failure can be retried. Throws [file], [hash], [image], [params] or what the driver says.
  Kernel& kernel();
  // Launches it with its own block, cluster and shared memory. `params` is its one parameter. All
  // kernels of the catalog wait for the one before them themselves (kernels/common/ptx.cuh), so by default
  // they overlap with its end.
  void launch(int64_t grid_x, int64_t grid_y, const Device& device, const void* params,
              bool overlap = true);

  bool loaded() const { return ready_.load(std::memory_order_acquire) != nullptr; }

 private:
  CatalogEntry entry_;
  std::string folder_;
  std::mutex mutex_;                     // guards the load
  std::atomic<Kernel*> ready_{nullptr};  // leaked on purpose: graphs may hold it until exit
};

class Catalog {
 public:
  // The one catalog of this process: the folder `cubins` beside the library, or the folder that
  // the environment variable TORCH_CUBIN_CATALOG names when it is first used.
  static Catalog& get();

  // Throws [file] for a missing or malformed manifest; nothing is half-read.
  explicit Catalog(const std::string& folder);

  std::deque<CatalogKernel>& kernels() { return kernels_; }

  // The best arch in the catalog for a device: exact with 'a', then family 'f', then the highest
  // plain one of the same major. Throws [arch], listing wanted and found.
  std::string arch_for(const Device& device) const;

  // The manifest, with "path", "archs", "loaded" [{"name", "arch"}] and "refused" [{"name", "arch",
  // "message"}]: the kernels that this library would not load, as far as the manifest tells.
  std::string to_json() const;

 private:
  std::string folder_;
  std::string manifest_;               // the file's text
  std::deque<CatalogKernel> kernels_;  // never moved: kernels hand out references
};

}  // namespace torch_cubin
