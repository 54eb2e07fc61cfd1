#include "package/catalog.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "cubin/error.h"
#include "cubin/sha256.h"
#include "driver/dl.h"
#include "package/family_table.h"
#include "package/files.h"
#include "package/kept_error.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

constexpr size_t kManifestLimit = 64u << 20;
constexpr size_t kCubinLimit = 256u << 20;

struct ParamsDigest {
  const char* family;
  const char* digest;
};

// One for each csrc/kernels/<family>/*_params.h, written by setup.py; csrc/kernels/build writes
// the same to the manifest.
constexpr ParamsDigest kParamsDigests[] = {
#include "params_digests.inc"
};

std::string digest_of_family(const std::string& family) {
  for (const ParamsDigest& known : kParamsDigests) {
    if (family == known.family) return known.digest;
  }
  return "";
}

// "sm_90a" -> {90, 'a'}
Arch parse_arch(const std::string& text) {
  Arch arch;
  if (text.rfind("sm_", 0) != 0) return arch;
  size_t i = 3;
  while (i < text.size() && text[i] >= '0' && text[i] <= '9' && i < 7) {
    arch.sm = arch.sm * 10 + (text[i++] - '0');
  }
  if (i < text.size()) arch.suffix = text[i++];
  if (i != text.size()) arch.sm = 0;
  return arch;
}

bool is_plain_relative(const std::string& path) {
  return !path.empty() && path[0] != '/' && path.find("..") == std::string::npos &&
         path.find('\\') == std::string::npos;
}

template <size_t N, typename T>
void read_triple(const json& object, const char* key, T (&out)[N]) {
  const json& list = object.at(key);
  if (list.size() != N) throw std::runtime_error(std::string(key) + " needs 3 numbers");
  for (size_t i = 0; i < N; ++i) out[i] = list.at(i).get<T>();
}

// What the host divides by, or hands to the driver.
void check_numbers(const CatalogEntry& e) {
  const auto product = [](const uint32_t (&dims)[3]) {
    return uint64_t{dims[0]} * dims[1] * dims[2];
  };
  const bool tile = e.tile[0] > 0 && e.tile[1] > 0 && e.tile[2] > 0;
  const bool block = product(e.block) >= 1 && product(e.block) <= 1024;
  const bool cluster = product(e.cluster) >= 1 && product(e.cluster) <= 16;
  const bool cost = e.cost_k_tile >= 0 && e.cost_fixed >= 0 && e.cost_lone >= 0;
  if (!tile || !block || !cluster || !cost || e.alignment < 1 || e.blocks_per_multiprocessor < 1) {
    throw std::runtime_error("kernel '" + e.name + "' has a number out of range");
  }
}

CatalogEntry read_entry(const json& object) {
  CatalogEntry e;
  e.name = object.at("name").get<std::string>();
  e.family = object.at("family").get<std::string>();
  e.kind = object.at("kind").get<std::string>();
  e.arch = object.at("arch").get<std::string>();
  e.file = object.at("file").get<std::string>();
  e.sha256 = object.at("sha256").get<std::string>();
  e.symbol = object.at("symbol").get<std::string>();
  e.math = object.at("math").get<std::string>();
  e.layout = object.at("layout").get<std::string>();
  e.alignment = object.at("alignment").get<int>();
  read_triple(object, "tile", e.tile);
  read_triple(object, "block", e.block);
  read_triple(object, "cluster", e.cluster);
  e.dynamic_shared = object.at("dynamic_shared").get<uint32_t>();
  e.blocks_per_multiprocessor = object.at("blocks_per_multiprocessor").get<int>();
  e.cost_k_tile = object.at("cost").at("k_tile").get<double>();
  e.cost_fixed = object.at("cost").at("fixed").get<double>();
  e.cost_lone = object.at("cost").value("lone", e.cost_lone);
  check_numbers(e);
  for (const json& p : object.at("params")) {
    ParamInfo info;
    info.index = p.at("index").get<uint32_t>();
    info.offset = p.at("offset").get<uint32_t>();
    info.size = p.at("size").get<uint32_t>();
    e.params.push_back(info);
  }
  e.params_digest = object.value("params_digest", "");
  e.parsed_arch = parse_arch(e.arch);
  if (e.parsed_arch.sm == 0) throw std::runtime_error("arch '" + e.arch + "' is not sm_XY[a|f]");
  if (!is_plain_relative(e.file))
    throw std::runtime_error("file '" + e.file + "' leaves the folder");
  return e;
}

std::string default_folder() {
  const char* chosen = std::getenv("TORCH_CUBIN_CATALOG");
  if (chosen != nullptr && chosen[0] != '\0') return chosen;
  const std::string library = dl_path_of(reinterpret_cast<const void*>(&default_folder));
  const size_t slash = library.rfind('/');
  return (slash == std::string::npos ? std::string(".") : library.substr(0, slash)) + "/cubins";
}

std::string params_text(const std::vector<ParamInfo>& params) {
  std::string text = counted(params.size(), "parameter") + " (";
  for (const ParamInfo& p : params) {
    text +=
        (p.index == 0 ? "" : ", ") + counted(p.size, "byte") + " at " + std::to_string(p.offset);
  }
  return text + ")";
}

bool same_params(const std::vector<ParamInfo>& a, const std::vector<ParamInfo>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].index != b[i].index || a[i].offset != b[i].offset || a[i].size != b[i].size) {
      return false;
    }
  }
  return true;
}

}  // namespace

Catalog::Catalog(const std::string& folder) : folder_(folder) {
  const std::string path = folder + "/manifest.json";
  const std::vector<uint8_t> bytes = read_file(path, kManifestLimit);
  manifest_.assign(bytes.begin(), bytes.end());
  try {
    const json manifest = json::parse(manifest_);
    const int version = manifest.at("version").get<int>();
    if (version != 1) throw std::runtime_error("version " + std::to_string(version));
    std::set<std::pair<std::string, std::string>> seen;
    for (const json& object : manifest.at("kernels")) {
      CatalogEntry entry = read_entry(object);
      if (!seen.emplace(entry.name, entry.arch).second) {
        throw std::runtime_error("kernel '" + entry.name + "' stands twice for " + entry.arch);
      }
      kernels_.emplace_back(std::move(entry), folder);
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    fail({"file", "manifest '" + path + "'", "cannot be used", "a version 1 kernel manifest",
          error.what(), "Build the kernels again, or install the package again."});
  }
}

Catalog& Catalog::get() {
  static std::atomic<Catalog*> ready{nullptr};  // leaked on purpose, as its kernels are
  static std::mutex mutex;                      // guards the making of `ready`
  raise_kept_error();
  Catalog* catalog = ready.load(std::memory_order_acquire);
  if (catalog != nullptr) return *catalog;
  std::lock_guard<std::mutex> lock(mutex);
  catalog = ready.load(std::memory_order_relaxed);
  if (catalog == nullptr) {
    catalog = new Catalog(default_folder());
    ready.store(catalog, std::memory_order_release);
  }
  return *catalog;
}

std::string Catalog::arch_for(const Device& device) const {
  const CatalogEntry* best = nullptr;
  std::set<std::string> found;
  auto rank = [](const Arch& arch) {
    return (arch.suffix == 'a' ? 2000 : arch.suffix == 'f' ? 1000 : 0) + arch.sm;
  };
  for (const CatalogKernel& kernel : kernels_) {
    const CatalogEntry& entry = kernel.entry();
    found.insert(entry.arch);
    if (!entry.parsed_arch.runs_on(device.sm)) continue;
    if (best == nullptr || rank(entry.parsed_arch) > rank(best->parsed_arch)) best = &entry;
  }
  if (best != nullptr) return best->arch;
  std::string list;
  for (const std::string& arch : found) list += (list.empty() ? "" : ", ") + arch;
  fail({"arch", "the kernel catalog '" + folder_ + "'", "has no kernels for " + device.name,
        "an arch that runs on compute capability " + std::to_string(device.sm / 10) + "." +
            std::to_string(device.sm % 10),
        list.empty() ? "none" : list,
        "Build the kernels with TORCH_CUBIN_ARCHS=sm_" + std::to_string(device.sm) + "."});
}

std::string Catalog::to_json() const {
  json out = json::parse(manifest_);
  out["path"] = folder_;
  json loaded = json::array();
  json refused = json::array();
  std::set<std::string> archs;
  for (const CatalogKernel& kernel : kernels_) {
    archs.insert(kernel.entry().arch);
    if (kernel.loaded()) {
      loaded.push_back({{"name", kernel.entry().name}, {"arch", kernel.entry().arch}});
    }
    try {
      kernel.check_params_digest();
    } catch (const Error& error) {
      refused.push_back({{"name", kernel.entry().name},
                         {"arch", kernel.entry().arch},
                         {"message", error.what()}});
    }
  }
  out["archs"] = archs;
  out["loaded"] = loaded;
  out["refused"] = refused;
  return out.dump(-1, ' ', false, json::error_handler_t::replace);
}

void CatalogKernel::check_params_digest() const {
  const std::string known = digest_of_family(entry_.family);
  if (!known.empty() && known == entry_.params_digest) return;
  fail({"params", "catalog kernel '" + entry_.name + "'",
        "takes other parameters than this library passes",
        known.empty() ? "a family that this library has" : "params_digest " + known,
        known.empty()                  ? "family '" + entry_.family + "'"
        : entry_.params_digest.empty() ? "none"
                                       : entry_.params_digest,
        "Build the library and its kernels from one source tree."});
}

void CatalogKernel::launch(int64_t grid_x, int64_t grid_y, const Device& device, const void* params,
                           bool overlap) {
  LaunchConfig config;
  config.grid[0] = static_cast<uint32_t>(grid_x);
  config.grid[1] = static_cast<uint32_t>(grid_y);
  std::copy(std::begin(entry_.block), std::end(entry_.block), config.block);
  std::copy(std::begin(entry_.cluster), std::end(entry_.cluster), config.cluster);
  config.dynamic_shared = entry_.dynamic_shared;
  config.waits_itself = overlap;
  void* pointers[] = {const_cast<void*>(params)};
  torch_cubin::launch(kernel(), config, device, pointers);
}

Kernel& CatalogKernel::kernel() {
  Kernel* kernel = ready_.load(std::memory_order_acquire);
  if (kernel != nullptr) return *kernel;
  std::lock_guard<std::mutex> lock(mutex_);
  kernel = ready_.load(std::memory_order_relaxed);
  if (kernel != nullptr) return *kernel;

  check_params_digest();
  const std::string path = folder_ + "/" + entry_.file;
  const std::string origin = "cubin '" + path + "'";
  const std::vector<uint8_t> bytes = read_file(path, kCubinLimit);
  const std::string hash = sha256_hex(bytes.data(), bytes.size());
  if (hash != entry_.sha256) {
    fail({"hash", origin, "is not the file that the manifest describes", "sha256 " + entry_.sha256,
          hash, "Build the kernels again, or install the package again."});
  }
  Image image = parse_cubin(bytes.data(), bytes.size(), origin);
  const KernelInfo& info = image.kernel(entry_.symbol);
  if (!same_params(info.params, entry_.params)) {
    fail({"params", "kernel '" + entry_.symbol + "' of " + origin,
          "has other parameters than the manifest says", params_text(entry_.params),
          params_text(info.params), "Build the kernels again, or install the package again."});
  }
  auto module = Module::load(std::move(image), bytes, origin);
  kernel = std::make_unique<Kernel>(std::move(module), entry_.symbol).release();
  ready_.store(kernel, std::memory_order_release);
  return *kernel;
}

void check_one_parameter(const CatalogEntry& entry, size_t bytes) {
  if (entry.params.size() == 1 && entry.params[0].size == bytes) {
    return;
  }
  fail({"params", "catalog kernel '" + entry.name + "'", "is of another build than this library",
        "1 parameter of " + counted(bytes, "byte"),
        counted(entry.params.size(), "parameter") +
            (entry.params.empty() ? "" : ", the first of " + counted(entry.params[0].size, "byte")),
        "Build the library and its kernels from one source tree."});
}

}  // namespace torch_cubin
