#include "runtime/kernel.h"

#include "cubin/error.h"

namespace torch_cubin {
namespace {

constexpr size_t kLogBytes = 4096;  // of the driver's PTX compiler

}  // namespace

std::shared_ptr<const Module> Module::load(Image image, const std::vector<uint8_t>& bytes,
                                           const std::string& origin) {
  std::shared_ptr<Module> module(new Module(std::move(image), origin));
  // The driver copies the image: the bytes may go after this call.
  check(driver().cuLibraryLoadData(&module->handle_, bytes.data(), nullptr, nullptr, 0, nullptr,
                                   nullptr, 0),
        "driver", "cuLibraryLoadData of " + origin);
  return module;
}

std::shared_ptr<const Module> Module::compile(Image image, const std::vector<uint8_t>& text,
                                              const std::string& origin) {
  std::shared_ptr<Module> module(new Module(std::move(image), origin));
  module->compiled_ = true;
  std::vector<char> log(kLogBytes, '\0');
  CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  // The driver takes numbers in place of pointers here.
  void* values[] = {log.data(), reinterpret_cast<void*>(log.size() - 1)};
  const CUresult result = driver().cuLibraryLoadData(&module->handle_, text.data(), options, values,
                                                     2, nullptr, nullptr, 0);
  if (result != CUDA_SUCCESS) {
    const std::string said = printable(log.data(), kLogBytes);
    check(result, "image",
          "cuLibraryLoadData of " + origin +
              " (the compiler says: " + (said.empty() ? "nothing" : said) + ")");
  }
  return module;
}

void Module::unload() const {
  if (handle_ == nullptr) return;
  check(driver().cuLibraryUnload(handle_), "driver", "cuLibraryUnload of " + origin_);
  handle_ = nullptr;
}

Module::~Module() {
  if (handle_ != nullptr) ignore_in_destructor(driver().cuLibraryUnload(handle_));
}

Kernel::Kernel(std::shared_ptr<const Module> module, const std::string& name)
    : module_(std::move(module)), info_(module_->image().kernel(name)) {}

CUfunction Kernel::prepare(const Device& device, uint32_t dynamic_shared) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Driver& d = driver();
  const std::string object = "kernel '" + name() + "' of " + module_->origin();
  const Arch& arch = module_->image().arch;
  if (!module_->is_compiled() && !arch.runs_on(device.sm)) {
    fail({"arch", object, "cannot run on " + device.name,
          "code for compute capability " + std::to_string(device.sm / 10) + "." +
              std::to_string(device.sm % 10),
          arch.name(), "Build it for this GPU's architecture."});
  }
  CUkernel handle = handle_.load(std::memory_order_relaxed);
  if (handle == nullptr) {
    check(d.cuLibraryGetKernel(&handle, module_->handle(), name().c_str()), "no_kernel",
          "cuLibraryGetKernel of " + object);
  }
  const uint32_t room = device.shared_optin > static_cast<int>(info_.static_shared)
                            ? device.shared_optin - info_.static_shared
                            : 0;
  if (dynamic_shared > room) {
    fail({"launch", object, "needs more shared memory than a block may have",
          "at most " + std::to_string(room) + " dynamic bytes (" +
              std::to_string(device.shared_optin) + " less " + std::to_string(info_.static_shared) +
              " static)",
          std::to_string(dynamic_shared), ""});
  }
  uint32_t limit = limit_[device.index].load(std::memory_order_relaxed);
  if (limit <= dynamic_shared) {
    int allowed = 0;
    check(d.cuKernelGetAttribute(&allowed, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, handle,
                                 device.handle),
          "launch", "cuKernelGetAttribute of " + object);
    if (static_cast<uint32_t>(allowed) < dynamic_shared) {
      check(d.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                   static_cast<int>(dynamic_shared), handle, device.handle),
            "launch", "cuKernelSetAttribute of " + object);
      allowed = static_cast<int>(dynamic_shared);
    }
    limit = static_cast<uint32_t>(allowed) + 1;
  }
  CUfunction function = functions_[device.index].load(std::memory_order_relaxed);
  if (function == nullptr) {
    check(d.cuKernelGetFunction(&function, handle), "launch", "cuKernelGetFunction of " + object);
  }
  handle_.store(handle, std::memory_order_relaxed);
  functions_[device.index].store(function, std::memory_order_relaxed);
  limit_[device.index].store(limit, std::memory_order_release);
  return function;
}

namespace {
std::atomic<int64_t> g_launches{0};
}  // namespace

void count_launch() { g_launches.fetch_add(1, std::memory_order_relaxed); }

int64_t launch_count() { return g_launches.load(std::memory_order_relaxed); }

namespace {

std::string dims_text(const uint32_t (&values)[3]) {
  return "(" + std::to_string(values[0]) + ", " + std::to_string(values[1]) + ", " +
         std::to_string(values[2]) + ")";
}

// A grid is never rounded here: only a kernel whose blocks past the last tile return may be given
// more blocks than there are tiles, and which kernels do so its host code knows alone.
void check_whole_clusters(const Kernel& kernel, const LaunchConfig& config) {
  uint32_t cluster[3];
  const auto& compiled = kernel.info().cluster;  // zeros where the binary demands none
  for (int i = 0; i < 3; ++i) cluster[i] = compiled[0] != 0 ? compiled[i] : config.cluster[i];
  for (int i = 0; i < 3; ++i) {
    if (config.grid[i] % cluster[i] == 0) continue;
    fail({"launch", "the launch of '" + kernel.name() + "'",
          "has a grid that is no whole number of clusters",
          "a multiple of " + std::to_string(cluster[i]) + " blocks in " + kAxes[i],
          "grid " + dims_text(config.grid) + ", cluster " + dims_text(cluster),
          "Round the grid up where the kernel is launched; its blocks past the last tile must do "
          "nothing."});
  }
}

}  // namespace

void launch(Kernel& kernel, const LaunchConfig& config, const Device& device, void** params) {
  check_whole_clusters(kernel, config);
  ContextGuard guard(device);
  const CUfunction function = kernel.ready(device, config.dynamic_shared);
  CUlaunchConfig launch{};
  launch.gridDimX = config.grid[0];
  launch.gridDimY = config.grid[1];
  launch.gridDimZ = config.grid[2];
  launch.blockDimX = config.block[0];
  launch.blockDimY = config.block[1];
  launch.blockDimZ = config.block[2];
  launch.sharedMemBytes = config.dynamic_shared;
  launch.hStream = current_stream(device.index);
  CUlaunchAttribute attributes[2] = {};
  launch.attrs = attributes;
  if (config.cluster[0] * config.cluster[1] * config.cluster[2] > 1) {
    CUlaunchAttribute& cluster = attributes[launch.numAttrs++];
    cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    cluster.value.clusterDim.x = config.cluster[0];
    cluster.value.clusterDim.y = config.cluster[1];
    cluster.value.clusterDim.z = config.cluster[2];
  }
  if (config.waits_itself && device.sm >= 90) {
    CUlaunchAttribute& programmatic = attributes[launch.numAttrs++];
    programmatic.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    programmatic.value.programmaticStreamSerializationAllowed = 1;
  }
  const CUresult result = driver().cuLaunchKernelEx(&launch, function, params, nullptr);
  if (result != CUDA_SUCCESS) {  // the text is built on failure only
    check(result, "launch",
          "the launch of '" + kernel.name() + "' with grid " + dims_text(config.grid) + ", block " +
              dims_text(config.block) + " and " + std::to_string(config.dynamic_shared) +
              " bytes of dynamic shared memory on cuda:" + std::to_string(device.index));
  }
  count_launch();
}

}  // namespace torch_cubin
