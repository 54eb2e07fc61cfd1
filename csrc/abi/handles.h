// The types behind the C ABI's handles (include/torch_cubin/abi.h), and its error handling.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "cubin/error.h"
#include "runtime/launch.h"
#include "runtime/module.h"
#include "torch_cubin/abi.h"

struct torch_cubin_v1_error {
  std::string tag, message;
  torch_cubin::Fault fault;  // without its tag
};

struct torch_cubin_v1_kernel {
  torch_cubin::Kernel* kernel;
  std::vector<torch_cubin_v1_param> params;
  // Parallel to params: the element types that an argument may have, or point to, shifted by the
  // one bit of arguments without a type; all bits if the file states nothing.
  std::vector<uint64_t> takes;
  // What a launch adds, if a file beside the cubin says so (Triton's .json); else null. params and
  // takes then lack the hidden parameters.
  const torch_cubin::LaunchNotes* filled = nullptr;
};

struct torch_cubin_v1_module {
  torch_cubin_v1_module(std::vector<torch_cubin::SourceImage> images, const std::string& origin,
                        torch_cubin::Lifetime lifetime)
      : module(std::move(images), origin, lifetime), names(module.names()) {}

  std::atomic<int64_t> references{1};
  torch_cubin::Module module;
  const std::vector<std::string> names;
  std::mutex mutex;  // guards the following members
  std::map<const torch_cubin::Kernel*, std::unique_ptr<torch_cubin_v1_kernel>> kernels;
};

namespace torch_cubin {

// A preallocated error for the case that an error object cannot be allocated: null would mean
// success.
torch_cubin_v1_error* no_memory_for_errors();

// Converts the exception that is being handled.
torch_cubin_v1_error* handled_error();

// Runs `work` and converts an exception to the returned error.
template <class Work>
torch_cubin_v1_error* guarded(Work work) {
  try {
    work();
    return nullptr;
  } catch (...) {
    return handled_error();
  }
}

// The device of that index; throws [input] for an invalid one.
inline const Device& device_of(int32_t index) {
  return device(index == TORCH_CUBIN_V1_CURRENT_DEVICE ? current_device() : index);
}

}  // namespace torch_cubin
