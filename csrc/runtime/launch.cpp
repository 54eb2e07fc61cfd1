#include "runtime/launch.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <optional>

#include "cubin/error.h"
#include "runtime/device_memory.h"
#include "runtime/launch_config.h"

namespace torch_cubin {
namespace {

constexpr int64_t kPortableCluster = 8;

void note_launch(const Kernel& kernel) {
  launches.count.fetch_add(1, std::memory_order_relaxed);
  launches.last_kernel.store(kernel.lasting_name(), std::memory_order_relaxed);
}

// The product of three sizes; INT64_MAX if it overflows (the sizes may be unchecked).
int64_t product(const int64_t* values) {
  int64_t result = values[0];
  for (int i = 1; i < 3; ++i) {
    if (__builtin_mul_overflow(result, values[i], &result)) return INT64_MAX;
  }
  return result;
}

// Builds its text only on failure.
[[gnu::cold]] void check_launch(CUresult result, const Kernel& kernel,
                                const torch_cubin_launch_call& call) {
  check(result, "launch",
        "the launch of kernel '" + printable(kernel.name()) + "' with grid " + triple(call.grid) +
            ", block " + triple(call.block) + " and " + std::to_string(call.shared_memory) +
            " bytes of dynamic shared memory on cuda:" + std::to_string(call.device));
}

// Whether the shape, apart from clusters, passes the checks of check_shape() and run() below.
bool is_common(const Kernel::OnDevice& here, const torch_cubin_launch_call& call) {
  bool fits = true;
  for (int i = 0; i < 3; ++i) {
    fits &= static_cast<uint64_t>(call.grid[i]) - 1 < static_cast<uint64_t>(kMaxGrid[i]);
    fits &= static_cast<uint64_t>(call.block[i]) - 1 < static_cast<uint64_t>(kMaxBlock[i]);
    fits &= here.common_block[0] == 0 || call.block[i] == here.common_block[i];
  }
  return fits && call.block[0] * call.block[1] * call.block[2] <= here.common_threads;
}

// Whether a launch on the stream needs no change of the current context. PyTorch's non-default
// streams carry their context, a default stream is that of the current context, and the stream that
// a caller passes may be any.
bool finds_context(CUstream stream, bool is_named, const Kernel::OnDevice& here) {
  if (!is_default_stream(stream) && !is_named) return true;
  CUcontext current = nullptr;
  return driver().cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == here.context;
}

// The kernel on the device of the thread's context, if the last such launch was there too; or null.
Kernel::OnDevice* find_by_context(const Kernel& kernel) {
  Kernel::OnDevice* last = kernel.last();
  CUcontext current = nullptr;
  if (last == nullptr || driver().cuCtxGetCurrent(&current) != CUDA_SUCCESS) return nullptr;
  return current == last->context ? last : nullptr;
}

// The facts that decide whether clusters fit on the device, packed into a nonzero number. The block
// and the shared memory are already checked: at most 1024 threads and 2^31 bytes.
uint64_t packed_cluster(const int64_t* cluster, const torch_cubin_launch_call& call) {
  uint64_t packed = 0;
  for (int i = 0; i < 3; ++i) packed = packed << 5 | static_cast<uint64_t>(cluster[i]);
  packed = packed << 11 | static_cast<uint64_t>(call.block[0] * call.block[1] * call.block[2]);
  return packed << 31 | static_cast<uint64_t>(call.shared_memory);
}

void set_dependent(CUlaunchConfig& config) {
  CUlaunchAttribute& attribute = config.attrs[config.numAttrs++];
  attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute.value.programmaticStreamSerializationAllowed = 1;
}

// Adds clusters and dependent launch. Returns false if they need the general path's checks.
bool add_common_attributes(const Kernel::OnDevice& here, const torch_cubin_launch_call& call,
                           bool lasts, CUlaunchConfig& config) {
  if ((call.flags & TORCH_CUBIN_CLUSTER) != 0 || here.has_cluster) {
    int64_t cluster[3];
    for (int i = 0; i < 3; ++i) {
      const int64_t compiled = here.info.cluster[i];
      cluster[i] = (call.flags & TORCH_CUBIN_CLUSTER) != 0 ? call.cluster[i] : compiled;
      if (cluster[i] <= 0 || cluster[i] > kMaxCluster ||
          (!here.grid_in_clusters && call.grid[i] % cluster[i] != 0) ||
          (here.has_cluster && cluster[i] != compiled)) {
        return false;
      }
    }
    const uint64_t packed = packed_cluster(cluster, call);
    if (here.checked_cluster(packed).load(std::memory_order_relaxed) != packed) return false;
    if (!here.has_cluster) set_cluster(cluster, config);
  }
  if ((call.flags & TORCH_CUBIN_DEPENDENT) != 0) {
    if (here.device.sm < 90) return false;
    if (lasts) set_dependent(config);
  }
  return true;
}

// The fast path, for common shapes of a kernel that ran on the device before. Returns false,
// without side effects, if the launch needs the general path, which takes 0.1 us longer. Touches
// little code and data because the driver's work evicts the L1 caches; [[gnu::hot]] places its
// functions side by side.
[[gnu::hot]] bool launch_common(Kernel& kernel, const torch_cubin_launch_call& call,
                                CurrentStream current_stream) {
  constexpr uint32_t kCommon = TORCH_CUBIN_STREAM | TORCH_CUBIN_DEPENDENT | TORCH_CUBIN_CLUSTER;
  if ((call.flags & ~kCommon) != 0) return false;
  const bool by_context = call.device == TORCH_CUBIN_CURRENT_DEVICE;
  const Kernel::OnDevice* here = by_context ? find_by_context(kernel)
                                 : static_cast<uint32_t>(call.device) < kMaxDevices
                                     ? kernel.find(call.device)
                                     : nullptr;
  if (here == nullptr) return false;
  // Unsigned: too few bytes wrap to a huge number and take the general path, as too many do.
  if (static_cast<uint64_t>(call.shared_memory) - here->least_shared >= INT_MAX) return false;
  if (!here->allows(static_cast<uint32_t>(call.shared_memory)) || !is_common(*here, call)) {
    return false;
  }
  const bool is_named = (call.flags & TORCH_CUBIN_STREAM) != 0 || current_stream == nullptr;
  const LaunchStream stream = is_named ? LaunchStream{static_cast<CUstream>(call.stream)}
                                       : current_stream(here->device.index);
  CUlaunchConfig config{};
  CUlaunchAttribute attributes[2];  // filled in order
  if (here->has_cluster || (call.flags & ~TORCH_CUBIN_STREAM) != 0) {
    config.attrs = attributes;
    if (!add_common_attributes(*here, call, stream.lasts, config)) return false;
  }
  set_shape(call, stream.handle, config);
  if (!by_context && !finds_context(config.hStream, is_named, *here)) return false;
  kernel.module().note_capture(config.hStream);
  const CUresult result = driver().cuLaunchKernelEx(&config, here->function, call.params, nullptr);
  if (result != CUDA_SUCCESS) check_launch(result, kernel, call);
  note_launch(kernel);
  return true;
}

class Launch {
 public:
  Launch(Kernel& kernel, const torch_cubin_launch_call& call, const KernelInfo& info,
         CurrentStream current_stream)
      : kernel_(kernel), call_(call), info_(info), current_stream_(current_stream) {
    for (int i = 0; i < 3; ++i) {
      cluster_[i] = has(TORCH_CUBIN_CLUSTER) ? call.cluster[i] : info.cluster[i];
    }
    clustered_ = cluster_[0] != 0;
  }

  // The checks that are independent of the device.
  void check_shape() const {
    for (int i = 0; i < 3; ++i) {
      if (call_.grid[i] <= 0) {
        refuse("has an empty grid", std::string("at least 1 block in ") + kAxes[i],
               "grid " + triple(call_.grid), "Skip the launch where there is nothing to do.");
      }
      if (call_.grid[i] > kMaxGrid[i]) {
        refuse("has too large a grid", "at most " + std::to_string(kMaxGrid[i]) + " in " + kAxes[i],
               "grid " + triple(call_.grid),
               i == 0 ? "" : "Put the largest extent in x, or loop in the kernel.");
      }
      if (call_.block[i] <= 0 || call_.block[i] > kMaxBlock[i]) {
        refuse("has a block that no GPU runs",
               "1 to " + std::to_string(kMaxBlock[i]) + " threads in " + kAxes[i],
               "block " + triple(call_.block), "");
      }
    }
    check_block();
    check_cluster();
    if (info_.param_bytes > kMaxParamBytes) {  // no compiler writes such a file
      fail({"params", "the launch of " + object(), "has more parameters than CUDA passes",
            "at most " + std::to_string(kMaxParamBytes) + " bytes",
            std::to_string(info_.param_bytes) + " bytes", ""});
    }
    if (call_.shared_memory < 0 || call_.shared_memory > INT_MAX) {
      refuse("has shared memory out of range", "0 or more bytes, as much as a block may have",
             std::to_string(call_.shared_memory), "");
    }
    if (call_.shared_memory == 0 && info_.uses_dynamic_shared) {
      refuse("gives no shared memory to a kernel that uses some and has none of its own",
             "shared_memory=, as many bytes as the kernel's source or its compiler's notes say",
             "0 bytes", kNoSharedMemoryAdvice);
    }
  }

  // What a compiler took arguments to be multiples of: it reads and writes whole vectors by that.
  void check_multiples() const {
    for (const ParamInfo& param : info_.params) {
      if (param.multiple_of == 1) continue;
      uint64_t value = 0;
      std::memcpy(&value, call_.params[param.index], std::min<size_t>(param.size, sizeof(value)));
      if (value % param.multiple_of == 0) continue;
      fail({"input", "argument " + std::to_string(param.index) + " of " + object(),
            "is not what the kernel was compiled for",
            "a multiple of " + std::to_string(param.multiple_of), std::to_string(value),
            "Triton compiles another kernel for other numbers and addresses: open that one's "
            "folder, or make both an op by torch_cubin.producers.triton.define_op."});
    }
  }

  void run(const Device& device) {
    check_device(device);
    const bool green = in_green_context(device);
    std::optional<ContextGuard> guard(std::in_place, device);
    Kernel::OnDevice& here = kernel_.on(device);
    if (product(call_.block) > here.max_threads) {
      refuse("has a block that the kernel cannot have on " + device.name,
             "at most " + std::to_string(here.max_threads) + " threads" +
                 (info_.registers == 0
                      ? ""
                      : " (it needs " + std::to_string(info_.registers) + " registers for each)"),
             "block " + triple(call_.block), "Launch smaller blocks.");
    }
    const auto shared = static_cast<uint32_t>(call_.shared_memory);
    CUfunction function = here.ready(shared);
    CUlaunchConfig config{};
    const LaunchStream stream = has(TORCH_CUBIN_STREAM) || current_stream_ == nullptr
                                    ? LaunchStream{static_cast<CUstream>(call_.stream)}
                                    : current_stream_(device.index);
    set_shape(call_, stream.handle, config);
    CUlaunchAttribute attributes[4];  // filled in order
    config.attrs = attributes;
    // The driver applies a compiled cluster by itself.
    if (clustered_ && info_.cluster[0] == 0) set_cluster(cluster_, config);
    if (has(TORCH_CUBIN_PRIORITY)) {
      check_priority(here, device);
      CUlaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = CU_LAUNCH_ATTRIBUTE_PRIORITY;
      attribute.value.priority = call_.priority;
    }
    if (clustered_ || has(TORCH_CUBIN_COOPERATIVE)) {
      check_residency(here, device, function, config);
    }
    if (has(TORCH_CUBIN_COOPERATIVE)) {
      CUlaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
      attribute.value.cooperative = 1;
    }
    if (has(TORCH_CUBIN_DEPENDENT) && stream.lasts) set_dependent(config);
    // PyTorch's work on the default stream runs on that of the current context. If that is a green
    // context, the launch must use it too, or it would not be ordered after that work. `function`
    // belongs to the primary context; the CUkernel handle works in any.
    if (green && is_default_stream(config.hStream)) {
      guard.reset();
      function = reinterpret_cast<CUfunction>(here.handle);
    }
    kernel_.module().note_capture(config.hStream);
    // A kernel's first launch may need memory for its code and local memory.
    const CUresult result = with_device_memory(device.index, [&] {
      return driver().cuLaunchKernelEx(&config, function, call_.params, nullptr);
    });
    if (result != CUDA_SUCCESS) check_launch(result, kernel_, call_);
    note_launch(kernel_);
  }

 private:
  bool has(uint32_t flag) const { return (call_.flags & flag) != 0; }
  std::string object() const { return "kernel '" + printable(kernel_.name()) + "'"; }

  [[noreturn]] void refuse(const std::string& problem, const std::string& expected,
                           const std::string& got, const std::string& advice) const {
    fail({"launch", "the launch of " + object(), problem, expected, got, advice});
  }

  void check_block() const {
    const int64_t threads = product(call_.block);
    if (threads > kMaxThreads) {
      refuse("has too many threads a block", "at most " + std::to_string(kMaxThreads),
             std::to_string(threads) + ", block " + triple(call_.block), "");
    }
    const auto& required = info_.required_block;
    for (int i = 0; i < 3; ++i) {
      if (required[0] != 0 && call_.block[i] != required[i]) {
        refuse("has another block than the kernel was compiled for",
               "block " + triple(required.data()), "block " + triple(call_.block), "");
      }
    }
    const auto& max = info_.max_block;
    const int64_t most = int64_t{max[0]} * max[1] * max[2];
    if (most != 0 && threads > most) {
      refuse("has a larger block than the kernel was compiled for",
             "at most " + std::to_string(most) + " threads (__launch_bounds__)",
             std::to_string(threads) + ", block " + triple(call_.block), "");
    }
  }

  void check_cluster() const {
    if (!has(TORCH_CUBIN_CLUSTER) && !clustered_) return;
    for (int i = 0; i < 3; ++i) {
      if (cluster_[i] <= 0) {
        refuse("has an empty cluster", std::string("at least 1 block in ") + kAxes[i],
               "cluster " + triple(cluster_), "");
      }
      if (info_.cluster[0] != 0 && cluster_[i] != info_.cluster[i]) {
        refuse("has another cluster than the kernel was compiled for",
               "cluster " + triple(info_.cluster.data()), "cluster " + triple(cluster_), "");
      }
    }
    if (product(cluster_) > kMaxCluster) {
      refuse("has too large a cluster", "at most " + std::to_string(kMaxCluster) + " blocks",
             std::to_string(product(cluster_)) + ", cluster " + triple(cluster_), "");
    }
    for (int i = 0; i < 3; ++i) {
      if (!info_.grid_in_clusters && call_.grid[i] % cluster_[i] != 0) {
        refuse("has a grid that is no whole number of clusters",
               "a multiple of " + std::to_string(cluster_[i]) + " blocks in " + kAxes[i],
               "grid " + triple(call_.grid) + ", cluster " + triple(cluster_), "");
      }
    }
  }

  void check_device(const Device& device) const {
    if (device.sm >= 90) return;
    const char* what = clustered_                   ? "a cluster"
                       : has(TORCH_CUBIN_DEPENDENT) ? "programmatic dependent launch"
                                                    : nullptr;
    if (what == nullptr) return;
    refuse("asks for " + std::string(what) + ", which " + device.name + " does not have",
           "compute capability 9.0 or newer", device.capability(), "");
  }

  void check_priority(Kernel::OnDevice& here, const Device& device) const {
    std::lock_guard<std::mutex> lock(here.mutex);
    int* range = here.priorities;
    if (range[0] > range[1]) {
      int greatest = 0, least = 0;
      check(driver().cuCtxGetStreamPriorityRange(&least, &greatest), "driver",
            "cuCtxGetStreamPriorityRange of cuda:" + std::to_string(device.index));
      range[0] = greatest;
      range[1] = least;
    }
    if (call_.priority >= range[0] && call_.priority <= range[1]) return;
    refuse("has a priority that the device does not know",
           std::to_string(range[0]) + " (first) to " + std::to_string(range[1]) + " (last)",
           std::to_string(call_.priority), "");
  }

  // Throws if a cooperative grid's blocks cannot all be resident, since it would hang, or if a
  // cluster cannot, since it would never start.
  void check_residency(Kernel::OnDevice& here, const Device& device, CUfunction function,
                       const CUlaunchConfig& config) const {
    std::lock_guard<std::mutex> lock(here.mutex);
    const int64_t cluster_blocks = clustered_ ? product(cluster_) : 1;
    if (cluster_blocks > kPortableCluster && !here.large_clusters) {
      check(driver().cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1,
                                          here.handle, device.handle),
            "launch", "cuKernelSetAttribute of " + object());
      here.large_clusters = true;
    }
    Kernel::Residency& last = here.residency;
    const bool known =
        last.blocks >= 0 && last.config.blockDimX == config.blockDimX &&
        last.config.blockDimY == config.blockDimY && last.config.blockDimZ == config.blockDimZ &&
        last.config.sharedMemBytes == config.sharedMemBytes &&
        (!clustered_ ? last.cluster[0] == 0
                     : last.cluster[0] == cluster_[0] && last.cluster[1] == cluster_[1] &&
                           last.cluster[2] == cluster_[2]);
    if (!known) {
      last.blocks = -1;
      int64_t blocks = 0;
      int count = 0;
      if (clustered_) {
        check(driver().cuOccupancyMaxActiveClusters(&count, function, &config), "launch",
              "cuOccupancyMaxActiveClusters of " + object());
        blocks = cluster_blocks * count;
      } else {
        check(driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                  &count, function, static_cast<int>(product(call_.block)),
                  static_cast<size_t>(call_.shared_memory)),
              "launch", "cuOccupancyMaxActiveBlocksPerMultiprocessor of " + object());
        blocks = int64_t{device.multiprocessors} * count;
      }
      last.config = config;
      for (int i = 0; i < 3; ++i) last.cluster[i] = static_cast<uint32_t>(cluster_[i]);
      last.blocks = blocks;
    }
    if (last.blocks < cluster_blocks) {
      refuse("has a cluster that does not fit on " + device.name,
             "blocks that run together with " + std::to_string(config.sharedMemBytes) +
                 " bytes of dynamic shared memory each",
             "cluster " + triple(cluster_), "Use smaller clusters, blocks or shared memory.");
    }
    const int64_t most = info_.grid_in_clusters ? last.blocks / cluster_blocks : last.blocks;
    if (has(TORCH_CUBIN_COOPERATIVE) && product(call_.grid) > most) {
      refuse("is cooperative and does not fit on " + device.name,
             "at most " + std::to_string(most) +
                 (info_.grid_in_clusters
                      ? " clusters of " + std::to_string(cluster_blocks) + " blocks of "
                      : " blocks of ") +
                 std::to_string(product(call_.block)) + " threads at once",
             std::to_string(product(call_.grid)) + ", grid " + triple(call_.grid),
             "Launch fewer blocks and let each do more.");
    }
    // Cached for launch_common(), which cooperative launches do not use.
    if (clustered_) {
      const uint64_t packed = packed_cluster(cluster_, call_);
      here.checked_cluster(packed).store(packed, std::memory_order_relaxed);
    }
  }

  Kernel& kernel_;
  const torch_cubin_launch_call& call_;
  const KernelInfo& info_;
  const CurrentStream current_stream_;
  int64_t cluster_[3];  // the call's or the compiled one; 0 if there is none
  bool clustered_;
};

void launch_checked(Kernel& kernel, const torch_cubin_launch_call& call,
                    CurrentStream current_stream) {
  refuse_forked();
  Launch launch(kernel, call, kernel.info_on(call.device), current_stream);
  launch.check_shape();
  launch.check_multiples();
  launch.run(device(call.device));
}

}  // namespace

int64_t launch_count() { return launches.count.load(std::memory_order_relaxed); }

[[gnu::hot]] void launch(Kernel& kernel, const torch_cubin_launch_call& call,
                         CurrentStream current_stream) {
  const Module::Use use(kernel.module());
  if (launch_common(kernel, call, current_stream)) return;
  if (call.device != TORCH_CUBIN_CURRENT_DEVICE) {
    launch_checked(kernel, call, current_stream);
    return;
  }
  torch_cubin_launch_call placed = call;
  placed.device = current_device();
  launch_checked(kernel, placed, current_stream);
  Kernel::OnDevice* here = kernel.find(placed.device);
  if (here != nullptr) kernel.remember(*here);
}

}  // namespace torch_cubin
