// The C ABI of kernels: facts, the check of arguments, the launch.
#include <algorithm>
#include <cstddef>

#include "abi/handles.h"
#include "abi/structs.h"
#include "runtime/kernel_facts.h"

using namespace torch_cubin;

namespace {

// The caller's launch struct starts with the layout of the runtime's, so it is passed on without a
// copy.
static_assert(offsetof(torch_cubin_v1_launch_call, params) ==
                  offsetof(torch_cubin_launch_call, params),
              "one layout");
static_assert(offsetof(torch_cubin_v1_launch_call, stream) ==
                  offsetof(torch_cubin_launch_call, stream),
              "one layout");
static_assert(offsetof(torch_cubin_v1_launch_call, shared_memory) ==
                  offsetof(torch_cubin_launch_call, shared_memory),
              "one layout");
static_assert(offsetof(torch_cubin_v1_launch_call, device) ==
                  offsetof(torch_cubin_launch_call, device),
              "one layout");
static_assert(TORCH_CUBIN_V1_COOPERATIVE == TORCH_CUBIN_COOPERATIVE &&
                  TORCH_CUBIN_V1_DEPENDENT == TORCH_CUBIN_DEPENDENT &&
                  TORCH_CUBIN_V1_PRIORITY == TORCH_CUBIN_PRIORITY &&
                  TORCH_CUBIN_V1_CLUSTER == TORCH_CUBIN_CLUSTER &&
                  TORCH_CUBIN_V1_CURRENT_DEVICE == TORCH_CUBIN_CURRENT_DEVICE,
              "one set of numbers");
constexpr uint32_t kLaunchFlags = TORCH_CUBIN_V1_COOPERATIVE | TORCH_CUBIN_V1_DEPENDENT |
                                  TORCH_CUBIN_V1_PRIORITY | TORCH_CUBIN_V1_CLUSTER;

constexpr uint32_t kKinds = 3;  // of an argument's kind, the bits below its element type

bool is_of_kind(const torch_cubin_v1_param& param, const torch_cubin_v1_argument& argument) {
  return (param.kind | (argument.kind & kKinds)) != kKinds;
}

bool fits(const torch_cubin_v1_param& param, uint64_t takes,
          const torch_cubin_v1_argument& argument) {
  // A number may be an address of any type.
  const bool is_address =
      param.kind == TORCH_CUBIN_V1_POINTER && (argument.kind & kKinds) != TORCH_CUBIN_V1_POINTER;
  const uint32_t element = argument.kind >> TORCH_CUBIN_V1_ELEMENT_SHIFT & 63;
  return param.size == argument.size && is_of_kind(param, argument) &&
         (is_address || (takes >> element & 1) != 0);
}

bool all_fit(const torch_cubin_v1_kernel& kernel, const torch_cubin_v1_argument* arguments,
             uint64_t count) {
  if (count != kernel.params.size()) return false;
  bool fit = true;
  for (uint64_t i = 0; i < count; ++i) fit &= fits(kernel.params[i], kernel.takes[i], arguments[i]);
  return fit;
}

const char* kind_text(uint32_t kind) {
  return kind == TORCH_CUBIN_V1_POINTER ? ", a pointer"
         : kind == TORCH_CUBIN_V1_VALUE ? ", no pointer"
                                        : "";
}

std::string table_of(const torch_cubin_v1_kernel& kernel) {
  std::string text = "The binary's parameters:";
  for (size_t i = 0; i < kernel.params.size() && i < 40; ++i) {
    text += (i == 0 ? " " : "; ") + std::to_string(i) + ": " +
            counted(kernel.params[i].size, "byte") + kind_text(kernel.params[i].kind);
  }
  return text + (kernel.params.empty() ? " none." : ".");
}

std::string hidden_advice_of(const torch_cubin_v1_kernel& kernel, uint64_t given) {
  const std::string advice = hidden_advice(*kernel.kernel, given);
  return advice.empty() || kernel.filled != nullptr ? "" : " " + advice;
}

[[noreturn, gnu::cold]] void fail_arguments(const torch_cubin_v1_kernel& kernel,
                                            const torch_cubin_v1_argument* arguments,
                                            uint64_t count) {
  const std::string object = "kernel '" + printable(kernel.kernel->name()) + "'";
  if (count != kernel.params.size()) {
    fail({"params", object, "was given another number of arguments than it has parameters",
          std::to_string(kernel.params.size()), std::to_string(count),
          table_of(kernel) + hidden_advice_of(kernel, count)});
  }
  uint64_t wrong = 0;
  while (fits(kernel.params[wrong], kernel.takes[wrong], arguments[wrong])) ++wrong;
  const torch_cubin_v1_param& param = kernel.params[wrong];
  const char* type = arguments[wrong].type != nullptr ? arguments[wrong].type : "an argument";
  if (param.size == arguments[wrong].size && is_of_kind(param, arguments[wrong])) {
    const StatedType& stated = kernel.kernel->info().params[wrong].stated;
    const auto element = static_cast<int>(arguments[wrong].kind >> TORCH_CUBIN_V1_ELEMENT_SHIFT);
    fail({"params", "argument " + std::to_string(wrong) + " of " + object,
          "is of another type than its parameter", stated_text(stated),
          std::string(type) + (stated.is_pointer ? " to " : " of ") + element_name(element - 1),
          stated.is_pointer ? "Where its bits are meant, pass it as a void*."
                            : "Convert it, or pass its bits in a struct."});
  }
  fail({"params", "argument " + std::to_string(wrong) + " of " + object,
        param.size != arguments[wrong].size ? "has another size than its parameter"
                                            : "is of another kind than its parameter",
        counted(param.size, "byte") + kind_text(param.kind),
        std::string(type) + " of " + counted(arguments[wrong].size, "byte"), table_of(kernel)});
}

// Replaces a block of 0, 0, 0 by the block size that the launch notes or the binary require.
void fill_block(const torch_cubin_v1_kernel& handle, int32_t device,
                torch_cubin_v1_launch_call& launch) {
  if (launch.block[0] != 0 || launch.block[1] != 0 || launch.block[2] != 0) return;
  if (handle.filled != nullptr) {
    launch.block[0] = handle.filled->threads;
    launch.block[1] = launch.block[2] = 1;
    return;
  }
  const Kernel& kernel = *handle.kernel;
  const auto& required = kernel.info_on(device_of(device).index).required_block;
  if (required[0] == 0) {
    fail({"launch", "the launch of kernel '" + printable(kernel.name()) + "'",
          "says no block, and the binary demands none", "block(threads)", "none", ""});
  }
  std::copy(required.begin(), required.end(), launch.block);
}

// Adds what the launch notes state and the caller does not: block, shared memory, flags.
void fill_shape(const torch_cubin_v1_kernel& handle, int32_t device,
                torch_cubin_v1_launch_call& launch) {
  fill_block(handle, device, launch);
  if (handle.filled == nullptr) return;
  if (launch.shared_memory == 0) launch.shared_memory = handle.filled->shared_memory;
  if (handle.filled->cooperative) launch.flags |= TORCH_CUBIN_V1_COOPERATIVE;
  if (handle.filled->dependent) launch.flags |= TORCH_CUBIN_V1_DEPENDENT;
}

// The start of the caller's struct as the runtime's type: a copy would add a tenth to a launch's
// cost. No other translation unit sees both types.
const torch_cubin_launch_call& call_of(const torch_cubin_v1_launch_call& launch) {
  return reinterpret_cast<const torch_cubin_launch_call&>(launch);
}

void check_launch_struct(const torch_cubin_v1_launch_call& launch) {
  check_struct(launch);
  if ((launch.flags & ~kLaunchFlags) == 0) return;
  fail({"internal", "the flags of a launch", "are not all known to this library",
        "those of its own abi.h", std::to_string(launch.flags), "Use a newer libtorch_cubin."});
}

}  // namespace

void torch_cubin_v1_kernel_info(const torch_cubin_v1_kernel* kernel,
                                struct torch_cubin_v1_facts* out) {
  // This function cannot return an error.
  if (out->size < FirstVersion<struct torch_cubin_v1_facts>::kSize) return;
  const KernelInfo& info = kernel->kernel->info();
  struct torch_cubin_v1_facts made{};
  made.name = info.name.c_str();
  made.params = kernel->params.data();
  made.param_count = kernel->params.size();
  made.registers = info.registers;
  made.static_shared = info.static_shared;
  made.uses_dynamic_shared = info.uses_dynamic_shared ? 1 : 0;
  for (int i = 0; i < 3; ++i) {
    made.required_block[i] = info.required_block[i];
    made.max_block[i] = info.max_block[i];
    made.cluster[i] = info.cluster[i];
  }
  to_caller(made, out);
}

torch_cubin_v1_error* torch_cubin_v1_kernel_attributes(torch_cubin_v1_kernel* kernel, int32_t index,
                                                       torch_cubin_v1_attributes* out) {
  return guarded([&] {
    const KernelAttributes found = attributes_of(*kernel->kernel, device_of(index));
    struct torch_cubin_v1_attributes made{};
    made.max_threads = found.max_threads;
    made.registers = found.registers;
    made.static_shared = found.static_shared;
    made.max_dynamic_shared = found.max_dynamic_shared;
    made.local_bytes = found.local_bytes;
    made.constant_bytes = found.constant_bytes;
    made.binary_version = found.binary_version;
    made.ptx_version = found.ptx_version;
    to_caller(made, out);
  });
}

torch_cubin_v1_error* torch_cubin_v1_kernel_preload(torch_cubin_v1_kernel* kernel, int32_t index) {
  return guarded([&] { kernel->kernel->preload(device_of(index)); });
}

torch_cubin_v1_error* torch_cubin_v1_kernel_check(const torch_cubin_v1_kernel* kernel,
                                                  const torch_cubin_v1_argument* arguments,
                                                  uint64_t count) {
  return guarded([&] {
    if (!all_fit(*kernel, arguments, count)) fail_arguments(*kernel, arguments, count);
  });
}

namespace {

// A launch that is completed from the launch notes, and gets null for each hidden parameter.
[[gnu::cold]] void launch_filled(const torch_cubin_v1_kernel& kernel,
                                 const torch_cubin_v1_launch_call& given) {
  struct torch_cubin_v1_launch_call filled = from_caller(&given);
  fill_shape(kernel, given.device, filled);
  void* null = nullptr;
  std::vector<void*> params(given.params, given.params + given.argument_count);
  params.insert(params.end(), kernel.filled->hidden, &null);
  filled.params = params.data();
  torch_cubin::launch(*kernel.kernel, call_of(filled), nullptr);
}

}  // namespace

[[gnu::hot]] torch_cubin_v1_error* torch_cubin_v1_launch(
    torch_cubin_v1_kernel* kernel, const struct torch_cubin_v1_launch_call* launch) {
  try {
    if (launch->size < FirstVersion<struct torch_cubin_v1_launch_call>::kSize ||
        (launch->flags & ~kLaunchFlags) != 0) {
      check_launch_struct(*launch);
    }
    if (!all_fit(*kernel, launch->arguments, launch->argument_count)) {
      fail_arguments(*kernel, launch->arguments, launch->argument_count);
    }
    if (kernel->filled != nullptr) {
      launch_filled(*kernel, *launch);
    } else if (launch->block[0] == 0) {
      struct torch_cubin_v1_launch_call filled = from_caller(launch);
      fill_block(*kernel, launch->device, filled);
      torch_cubin::launch(*kernel->kernel, call_of(filled), nullptr);
    } else {
      torch_cubin::launch(*kernel->kernel, call_of(*launch), nullptr);
    }
    return nullptr;
  } catch (...) {
    return handled_error();
  }
}

torch_cubin_v1_error* torch_cubin_v1_kernel_occupancy(
    torch_cubin_v1_kernel* kernel, const struct torch_cubin_v1_launch_call* launch, int64_t* out) {
  return guarded([&] {
    check_launch_struct(*launch);
    struct torch_cubin_v1_launch_call filled = from_caller(launch);
    const Device& device = device_of(launch->device);
    fill_shape(*kernel, device.index, filled);
    *out = occupancy_of(*kernel->kernel, call_of(filled), device);
  });
}

int64_t torch_cubin_v1_launches(void) { return launch_count(); }
