#include "package/package_kernel.h"

#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

#include "cubin/error.h"
#include "runtime/kernel_facts.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

constexpr size_t kCubinLimit = 256u << 20;

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

// json::get would truncate a number that does not fit, and is undefined for a float out of range.
uint32_t read_number(const json& value, const char* key) {
  const bool whole = value.is_number_unsigned()
                         ? value.get<uint64_t>() <= UINT32_MAX
                         : value.is_number_integer() && value.get<int64_t>() >= 0 &&
                               value.get<int64_t>() <= UINT32_MAX;
  if (whole) return value.get<uint32_t>();
  throw std::runtime_error(std::string(key) + " needs whole numbers of 32 bits, not " +
                           value.dump(-1, ' ', false, json::error_handler_t::replace));
}

void read_triple(const json& object, const char* key, uint32_t (&out)[3]) {
  const json& list = object.at(key);
  if (!list.is_array() || list.size() != 3) {
    throw std::runtime_error(std::string(key) + " needs 3 numbers");
  }
  for (size_t i = 0; i < 3; ++i) out[i] = read_number(list[i], key);
}

// Checks the entry's block and cluster, which launches do not check.
void check_shape(const KernelEntry& e) {
  const auto fits = [](const uint32_t (&dims)[3], uint64_t most) {
    if (dims[0] > most || dims[1] > most || dims[2] > most) return false;
    const uint64_t product = uint64_t{dims[0]} * dims[1] * dims[2];
    return product >= 1 && product <= most;
  };
  if (fits(e.block, kMaxThreads) && fits(e.cluster, kMaxCluster)) return;
  throw std::runtime_error("kernel '" + e.name + "' has a number out of range");
}

KernelEntry read_kernel_entry(const json& object) {
  KernelEntry e;
  e.name = object.at("name").get<std::string>();
  e.family = object.at("family").get<std::string>();
  e.kind = object.at("kind").get<std::string>();
  e.arch = object.at("arch").get<std::string>();
  e.file = object.at("file").get<std::string>();
  e.sha256 = object.at("sha256").get<std::string>();
  e.symbol = object.at("symbol").get<std::string>();
  read_triple(object, "block", e.block);
  read_triple(object, "cluster", e.cluster);
  e.dynamic_shared = read_number(object.at("dynamic_shared"), "dynamic_shared");
  check_shape(e);
  for (const json& p : object.at("params")) {
    ParamInfo info;
    info.index = read_number(p.at("index"), "params");
    info.offset = read_number(p.at("offset"), "params");
    info.size = read_number(p.at("size"), "params");
    e.params.push_back(info);
  }
  e.params_header = object.value("params_header", "");
  e.params_digest = object.value("params_digest", "");
  e.parsed_arch = parse_arch(e.arch);
  if (e.parsed_arch.sm == 0) throw std::runtime_error("arch '" + e.arch + "' is not sm_XY[a|f]");
  if (!is_inside_package(e.file)) {
    throw std::runtime_error("file '" + e.file + "' leaves the folder");
  }
  return e;
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

PackageKernel::PackageKernel(const json& entry, std::shared_ptr<const PackageFiles> files)
    : entry_(read_kernel_entry(entry)),
      fields_(std::make_unique<const json>(entry)),
      files_(std::move(files)) {}

PackageKernel::~PackageKernel() = default;

std::vector<uint8_t> PackageKernel::cubin() const {
  return read_hashed(*files_, entry_.file, entry_.sha256, kCubinLimit,
                     "Build the kernels again, or install the package again.");
}

Kernel& PackageKernel::load() {
  refuse_forked();
  std::lock_guard<std::mutex> lock(mutex_);
  Kernel* kernel = kernel_.load(std::memory_order_relaxed);
  if (kernel != nullptr) return *kernel;

  SourceImage source;
  source.origin = files_->origin(entry_.file);
  source.bytes = cubin();
  source.image = parse_cubin(source.bytes.data(), source.bytes.size(), source.origin);
  const KernelInfo& info = source.image.kernel(entry_.symbol);
  if (!same_params(info.params, entry_.params)) {
    fail({"params", "kernel '" + entry_.symbol + "' of " + source.origin,
          "has other parameters than the manifest says", params_text(entry_.params),
          params_text(info.params), "Build the kernels again, or install the package again."});
  }
  const std::string origin = source.origin;
  std::vector<SourceImage> images;
  images.push_back(std::move(source));
  auto module = std::make_unique<Module>(std::move(images), origin, Lifetime::kUntilExit);
  kernel = &module->kernel(entry_.symbol);
  (void)module.release();  // never freed
  kernel_.store(kernel, std::memory_order_release);
  return *kernel;
}

bool PackageKernel::has_capacity_for_cluster(int64_t blocks, const Device& device,
                                             int64_t dynamic_shared) {
  torch_cubin_launch_call call{};
  call.size = sizeof(call);
  call.flags = TORCH_CUBIN_CLUSTER;
  for (int i = 0; i < 3; ++i) {
    call.block[i] = entry_.block[i];
    call.cluster[i] = 1;
  }
  call.cluster[0] = blocks;
  call.shared_memory = dynamic_shared >= 0 ? dynamic_shared : entry_.dynamic_shared;
  return occupancy_of(kernel(), call, device) > 0;
}

namespace {

// Whether programs have kernels of Inductor that start early. Those wait for the kernel before only
// if they read its results, and rely on all older ones to have ended. So these must have when a
// kernel of ours starts, since ours let the next one start at once.
bool others_start_early() {
  static const bool chosen = [] {
    const char* const value = std::getenv("TORCHINDUCTOR_ENABLE_PDL");
    return value != nullptr && std::strcmp(value, "1") == 0;
  }();
  return chosen;
}

}  // namespace

void PackageKernel::launch(const Grid& grid, const Device& device, const void* params,
                           CurrentStream current_stream, bool overlap) {
  Kernel& loaded = kernel();
  torch_cubin_launch_call call;
  call.size = sizeof(call);
  const bool early = overlap && device.sm >= 90 && !others_start_early();
  call.flags = early ? TORCH_CUBIN_DEPENDENT : 0;
  call.device = device.index;
  call.priority = 0;
  call.grid[0] = grid.x;
  call.grid[1] = grid.y;
  call.grid[2] = grid.z;
  for (int i = 0; i < 3; ++i) {
    call.block[i] = entry_.block[i];
    call.cluster[i] = entry_.cluster[i];
  }
  if (grid.block_x != 0) call.block[0] = grid.block_x;
  if (grid.cluster_x != 0) call.cluster[0] = grid.cluster_x;
  if (call.cluster[0] * call.cluster[1] * call.cluster[2] > 1) {
    call.flags |= TORCH_CUBIN_CLUSTER;
  }
  call.shared_memory = grid.dynamic_shared >= 0 ? grid.dynamic_shared : entry_.dynamic_shared;
  call.stream = nullptr;
  void* pointers[] = {const_cast<void*>(params)};
  call.params = pointers;
  torch_cubin::launch(loaded, call, current_stream);
}

}  // namespace torch_cubin
