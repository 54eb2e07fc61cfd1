#include "runtime/kernel_facts.h"

#include <climits>
#include <string>

#include "cubin/error.h"
#include "runtime/launch_config.h"
#include "runtime/module.h"

namespace torch_cubin {
namespace {

int kernel_attribute(const Kernel::OnDevice& here, CUfunction_attribute which) {
  int value = 0;
  check(driver().cuKernelGetAttribute(&value, which, here.handle, here.device.handle), "driver",
        "cuKernelGetAttribute of kernel '" + printable(here.info.name) + "'");
  return value;
}

}  // namespace

KernelAttributes attributes_of(Kernel& kernel, const Device& device) {
  const Module::Use use(kernel.module());
  const ContextGuard guard(device);
  const Kernel::OnDevice& here = kernel.on(device);
  KernelAttributes out;
  out.max_threads = here.max_threads;
  out.registers = kernel_attribute(here, CU_FUNC_ATTRIBUTE_NUM_REGS);
  out.static_shared = kernel_attribute(here, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
  out.max_dynamic_shared = device.shared_optin - out.static_shared;
  out.local_bytes = kernel_attribute(here, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
  out.constant_bytes = kernel_attribute(here, CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES);
  out.binary_version = kernel_attribute(here, CU_FUNC_ATTRIBUTE_BINARY_VERSION);
  out.ptx_version = kernel_attribute(here, CU_FUNC_ATTRIBUTE_PTX_VERSION);
  return out;
}

int64_t occupancy_of(Kernel& kernel, const torch_cubin_launch_call& call, const Device& device) {
  const Module::Use use(kernel.module());
  const ContextGuard guard(device);
  Kernel::OnDevice& here = kernel.on(device);
  const std::string object = "the occupancy of kernel '" + printable(kernel.name()) + "'";
  int64_t threads = 1;
  for (int i = 0; i < 3; ++i) {
    const bool in_range = call.block[i] >= 1 && call.block[i] <= kMaxBlock[i];
    if (in_range) threads *= call.block[i];
    if (!in_range || threads > here.max_threads) {
      fail({"launch", object, "is asked of a block that the kernel cannot have",
            "1 to " + std::to_string(here.max_threads) + " threads", "block " + triple(call.block),
            ""});
    }
  }
  if (call.shared_memory < 0 || call.shared_memory > INT_MAX) {
    fail({"launch", object, "is asked with shared memory out of range", "0 or more bytes",
          std::to_string(call.shared_memory), ""});
  }
  const CUfunction function = here.ready(static_cast<uint32_t>(call.shared_memory));
  int count = 0;
  const bool has_cluster = (call.flags & TORCH_CUBIN_CLUSTER) != 0;
  if (!has_cluster && !here.has_cluster) {
    check(driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
              &count, function, static_cast<int>(threads), static_cast<size_t>(call.shared_memory)),
          "launch", "cuOccupancyMaxActiveBlocksPerMultiprocessor of " + object);
    return count;
  }
  torch_cubin_launch_call one = call;  // cluster
  for (int i = 0; i < 3; ++i) {
    const int64_t asked = has_cluster ? call.cluster[i] : here.info.cluster[i];
    if (asked < 1 || asked > kMaxCluster) {
      fail({"launch", object, "is asked of a cluster that no GPU runs",
            "1 to " + std::to_string(kMaxCluster) + " blocks", std::to_string(asked), ""});
    }
    one.grid[i] = here.grid_in_clusters ? 1 : asked;
  }
  CUlaunchConfig config{};
  CUlaunchAttribute attribute{};
  config.attrs = &attribute;
  set_shape(one, nullptr, config);
  if (has_cluster && !here.has_cluster) set_cluster(one.grid, config);
  const CUresult result = driver().cuOccupancyMaxActiveClusters(&count, function, &config);
  if (result == CUDA_ERROR_INVALID_CLUSTER_SIZE) return 0;  // no cluster fits
  check(result, "launch", "cuOccupancyMaxActiveClusters of " + object);
  return count;
}

}  // namespace torch_cubin
