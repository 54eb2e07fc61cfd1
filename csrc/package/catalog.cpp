#include "package/catalog.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>

#include "cubin/error.h"
#include "driver/dl.h"
#include "package/load_error.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

std::string catalog_folder() {
  const char* chosen = std::getenv("TORCH_CUBIN_CATALOG");
  if (chosen != nullptr && chosen[0] != '\0') return chosen;
  const std::string library = dl_path_of(reinterpret_cast<const void*>(&catalog_folder));
  const size_t slash = library.rfind('/');
  return (slash == std::string::npos ? std::string(".") : library.substr(0, slash)) + "/cubins";
}

struct Catalog {
  explicit Catalog(const std::string& folder)
      : folder(folder),
        package(files_in_folder(folder, Links::kFollow), "the kernel catalog '" + folder + "'") {
    package.read_kernels();
  }
  std::string folder;
  Package package;
};

Catalog& the_catalog() {
  static std::atomic<Catalog*> ready{nullptr};  // never freed, like its kernels
  static std::mutex mutex;                      // guards the creation of `ready`
  raise_load_error();
  Catalog* catalog = ready.load(std::memory_order_acquire);
  if (catalog != nullptr) return *catalog;
  std::lock_guard<std::mutex> lock(mutex);
  catalog = ready.load(std::memory_order_relaxed);
  if (catalog == nullptr) {
    catalog = new Catalog(catalog_folder());
    ready.store(catalog, std::memory_order_release);
  }
  return *catalog;
}

}  // namespace

Package& catalog() { return the_catalog().package; }

json catalog_json() {
  Catalog& catalog = the_catalog();
  json out = catalog.package.manifest();
  out["path"] = catalog.folder;
  json loaded = json::array();
  std::set<std::string> archs;
  for (const PackageKernel& kernel : catalog.package.kernels()) {
    archs.insert(kernel.entry().arch);
    if (kernel.loaded()) {
      loaded.push_back({{"name", kernel.entry().name}, {"arch", kernel.entry().arch}});
    }
  }
  out["archs"] = archs;
  out["loaded"] = loaded;
  return out;
}

std::vector<uint8_t> catalog_cubin(const std::string& name, const std::string& arch) {
  Package& package = catalog();
  for (const PackageKernel& kernel : package.kernels()) {
    if (kernel.entry().name == name && kernel.entry().arch == arch) return kernel.cubin();
  }
  fail({"no_kernel", package.label(), "has no kernel of this name", "one of those in its manifest",
        "'" + printable(name) + "' for " + printable(arch), ""});
}

}  // namespace torch_cubin
