// Includes PyTorch's header of tensor functions (torch::stable) with our errors in place of "API
// call failed". No other file may include that header: its inline functions must be the same
// everywhere.
#pragma once

// The other users of the macros that are redefined below come first.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

namespace torch_cubin {

// Throws [oom] if out of memory, else [internal] with PyTorch's message. `call` is the source text
// of the failed call, which names the op.
[[noreturn]] void fail_stable_op(const char* call);

}  // namespace torch_cubin

#pragma push_macro("TORCH_ERROR_CODE_CHECK")
#pragma push_macro("STABLE_TORCH_ERROR_CODE_CHECK")
#undef TORCH_ERROR_CODE_CHECK
#undef STABLE_TORCH_ERROR_CODE_CHECK
#define TORCH_ERROR_CODE_CHECK(call) \
  if ((call) != 0) ::torch_cubin::fail_stable_op(#call)
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)

#include <torch/csrc/stable/ops.h>

#pragma pop_macro("STABLE_TORCH_ERROR_CODE_CHECK")
#pragma pop_macro("TORCH_ERROR_CODE_CHECK")
