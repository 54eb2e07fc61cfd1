// torch::stable's functions on tensors, whose failures are errors of ours: PyTorch's header throws
// "API call failed" and its place in the source. The one way to that header: its functions are inline,
// and must be the same in every file.
#pragma once

// What else uses the macros that are replaced below.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

namespace torch_cubin {

// Throws [oom] for a lack of memory, else [internal] with what PyTorch says. `call`: the failed call's
// text, which names the op.
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
