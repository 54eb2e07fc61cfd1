#include "runtime/kernel.h"

#include <algorithm>
#include <set>

#include "cubin/error.h"
#include "runtime/device_memory.h"
#include "runtime/module.h"

namespace torch_cubin {
namespace {

// A copy of the name that is never freed: an error may name the kernel after it was deleted.
const char* lasting(const std::string& name) {
  static std::mutex& mutex = *new std::mutex;
  static std::set<std::string>& names = *new std::set<std::string>;
  std::lock_guard<std::mutex> lock(mutex);
  return names.insert(name).first->c_str();
}

}  // namespace

Kernel::Kernel(Module& module, KernelInfo info)
    : module_(module),
      info_(std::move(info)),
      lasting_name_(lasting(info_.name)),
      same_shape_(module.agree_on_shape(info_.name)) {}

const KernelInfo& Kernel::info_on(int32_t device_index) const {
  return same_shape_ ? info_ : module_.info(device(device_index), name());
}

Kernel::OnDevice::OnDevice(std::shared_ptr<const LoadedImage> loaded, const std::string& name,
                           const Device& on)
    : context(on.context), device(on), image(std::move(loaded)), info(image->image().kernel(name)) {
  const Driver& d = driver();
  const Arch& arch = image->image().arch;
  if (!image->is_compiled() && !arch.runs_on(device.sm)) {
    fail({"arch", object(), "cannot run on " + device.name,
          "code for compute capability " + device.capability(), arch.name(),
          "Build it for this GPU's architecture."});
  }
  check(with_device_memory(
            device.index,
            [&] { return d.cuLibraryGetKernel(&handle, image->handle(), name.c_str()); }),
        "no_kernel", "cuLibraryGetKernel of " + object());
  raise_limit(0);
  check(with_device_memory(device.index, [&] { return d.cuKernelGetFunction(&function, handle); }),
        "launch", "cuKernelGetFunction of " + object());
  check(d.cuKernelGetAttribute(&max_threads, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, handle,
                               device.handle),
        "driver", "cuKernelGetAttribute of kernel '" + printable(name) + "'");
  has_cluster = info.cluster[0] != 0;
  grid_in_clusters = info.grid_in_clusters;
  least_shared = info.uses_dynamic_shared ? 1 : 0;
  const int64_t compiled = int64_t{info.max_block[0]} * info.max_block[1] * info.max_block[2];
  common_threads =
      std::min<int64_t>({kMaxThreads, max_threads, compiled != 0 ? compiled : kMaxThreads});
  // Forces the general path, which checks such parameters; launch_common() does not.
  const auto is_multiple = [](const ParamInfo& param) { return param.multiple_of != 1; };
  if (info.param_bytes > kMaxParamBytes ||
      std::any_of(info.params.begin(), info.params.end(), is_multiple)) {
    common_threads = 0;
  }
  std::copy(info.required_block.begin(), info.required_block.end(), common_block);
}

std::string Kernel::OnDevice::object() const {
  return "kernel '" + info.name + "' of " + image->origin();
}

CUfunction Kernel::OnDevice::raise_limit(uint32_t dynamic_shared) {
  refuse_forked();
  std::lock_guard<std::mutex> lock(limit_mutex_);
  const Driver& d = driver();
  const uint32_t capacity = device.shared_optin > static_cast<int>(info.static_shared)
                                ? device.shared_optin - info.static_shared
                                : 0;
  if (dynamic_shared > capacity) {
    fail({"launch", object(), "needs more shared memory than a block may have",
          "at most " + std::to_string(capacity) + " dynamic bytes (" +
              std::to_string(device.shared_optin) + " less " + std::to_string(info.static_shared) +
              " static)",
          std::to_string(dynamic_shared), ""});
  }
  if (allows(dynamic_shared)) return function;
  int allowed = 0;
  check(d.cuKernelGetAttribute(&allowed, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, handle,
                               device.handle),
        "launch", "cuKernelGetAttribute of " + object());
  if (static_cast<uint32_t>(allowed) < dynamic_shared) {
    check(d.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                 static_cast<int>(dynamic_shared), handle, device.handle),
          "launch", "cuKernelSetAttribute of " + object());
    allowed = static_cast<int>(dynamic_shared);
  }
  shared_limit.store(static_cast<uint32_t>(allowed) + 1, std::memory_order_release);
  return function;
}

Kernel::OnDevice& Kernel::load(const Device& device) {
  refuse_forked();
  std::lock_guard<std::mutex> lock(mutex_);
  OnDevice* ready = on_[device.index].load(std::memory_order_relaxed);
  if (ready != nullptr) return *ready;
  ready = new OnDevice(module_.on(device, name()), name(), device);
  on_[device.index].store(ready, std::memory_order_release);
  return *ready;
}

void Kernel::preload(const Device& device) {
  const Module::Use use(module_);
  const ContextGuard guard(device);
  const CUfunction function = on(device).function;
  // With lazy loading, CUDA loads the code when an attribute of the function is queried.
  int registers = 0;
  check(with_device_memory(device.index,
                           [&] {
                             return driver().cuFuncGetAttribute(
                                 &registers, CU_FUNC_ATTRIBUTE_NUM_REGS, function);
                           }),
        "driver", "cuFuncGetAttribute of kernel '" + printable(name()) + "'");
}

void Kernel::forget() {
  last_.store(nullptr);
  for (std::atomic<OnDevice*>& slot : on_) delete slot.exchange(nullptr);
}

}  // namespace torch_cubin
