// Kernels of ours as those of aten's operators: their boxed form for PyTorch's dispatcher.
#pragma once

#include <torch/csrc/stable/library.h>

#include <utility>

#include "cubin/error.h"
#include "pytorch/torch_error.h"

namespace torch_cubin {

using torch::stable::detail::StableLibrary;

// A kernel's function, whose [oom] becomes the error that programs catch around PyTorch's kernel.
template <auto kFunction>
struct OverAten;
template <class Result, class... Args, Result (*kFunction)(Args...)>
struct OverAten<kFunction> {
  static Result call(Args... args) {
    try {
      return kFunction(std::forward<Args>(args)...);
    } catch (const Error& error) {
      if (error.tag() == "oom") throw_torch_out_of_memory(error.what());
      throw;
    }
  }
};
#define TC_OVER_ATEN(function) TORCH_BOX(&OverAten<&(function)>::call)

}  // namespace torch_cubin
