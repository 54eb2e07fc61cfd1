// The public ops forward through the dispatcher, and do nothing else.
//
// NOTE: reading a size here would make torch.compile build one graph a size, and calling a kernel
// directly would hand it tensors without data. So the boxed arguments pass through untouched,
// which also saves the wrapping of every tensor: the callee takes the stack over as it came.
#include "ops/composite.h"

#include <stdexcept>
#include <string>

#include "cubin/error.h"
#include "runtime/autograd_state.h"
#include "runtime/torch_error.h"

namespace torch_cubin {
namespace {

void forward(const char* raw, const char* autograd, StableIValue* stack) {
  clear_last_error();
  // A dual tensor keeps its tangent under no_grad, so an open forward-AD level counts as well.
  const bool differentiable = aoti_torch_grad_mode_is_enabled() || dual_level_is_open();
  const char* op = differentiable ? autograd : raw;
  if (torch_call_dispatcher(op, "", stack, TORCH_ABI_VERSION) == AOTI_TORCH_SUCCESS) return;

  // Below torch 2.13 the C API loses an error's text: what fail() kept on this thread replaces it.
  if (!last_error().empty()) throw std::runtime_error(last_error());
  const std::string text = torch_error();
  if (!text.empty()) throw std::runtime_error(text);
  fail({"internal", std::string("PyTorch's dispatcher"), std::string("could not run ") + op,
        "a kernel for these tensors",
        "an error whose text this version of PyTorch prints on stderr",
        "Look above, or use torch 2.13 or newer, which carries it here."});
}

}  // namespace

void matmul_composite(StableIValue* stack, uint64_t, uint64_t) {
  forward("cubin::_matmul", "cubin::_matmul_autograd", stack);
}

void linear_composite(StableIValue* stack, uint64_t, uint64_t) {
  forward("cubin::_linear", "cubin::_linear_autograd", stack);
}

}  // namespace torch_cubin

extern "C" __attribute__((visibility("default"))) void torch_cubin_keep_error(const char* message) {
  try {
    torch_cubin::fail_with_text("internal", message);
  } catch (const torch_cubin::Error&) {
    // Thrown only to be kept: the caller raises it again in Python.
  }
}
