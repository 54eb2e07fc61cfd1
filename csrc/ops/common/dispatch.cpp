#include "ops/common/dispatch.h"

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cubin/error.h"
#include "ops/common/argument_checks.h"
#include "pytorch/autograd_state.h"
#include "pytorch/torch_error.h"

namespace torch_cubin {

// A dual tensor keeps its tangent under no_grad, so an open forward-AD level counts too.
bool differentiable() { return aoti_torch_grad_mode_is_enabled() || dual_level_is_open(); }

bool differentiable(const StableIValue* stack, LeadingTensors tensors) {
  using torch::stable::detail::to;
  if (dual_level_is_open()) return true;
  if (!aoti_torch_grad_mode_is_enabled()) return false;
  if (transform_is_active()) return true;
  const StableIValue* const optional = stack + tensors.required;
  for (; stack != optional; ++stack) {
    if (requires_grad(to<AtenTensorHandle>(*stack))) return true;
  }
  for (; stack != optional + tensors.optional; ++stack) {
    // An optional argument is the address of its value, or null.
    const auto* const given = reinterpret_cast<const StableIValue*>(*stack);
    if (given != nullptr && requires_grad(to<AtenTensorHandle>(*given))) return true;
  }
  return false;
}

void call_op(const char* op, const char* overload, StableIValue* stack) {
  clear_last_error();
  if (torch_call_dispatcher(op, overload, stack, TORCH_ABI_VERSION) == AOTI_TORCH_SUCCESS) return;

  // Below torch 2.13 the C API loses an error's text; fail() stored it on this thread.
  if (!last_error().empty()) throw std::runtime_error(last_error());
  const std::string text = torch_error();
  if (!text.empty()) throw std::runtime_error(text);
  fail({"internal", std::string("PyTorch's dispatcher"), std::string("could not run ") + op,
        "a kernel for these tensors",
        "an error whose text this version of PyTorch prints on stderr",
        "Look above, or use torch 2.13 or newer, which carries it here."});
}

void call_by_grad_mode(const char* raw, const char* autograd, StableIValue* stack) {
  call_op(differentiable() ? autograd : raw, "", stack);
}

void call_by_grad_mode(const char* raw, const char* autograd, StableIValue* stack,
                       LeadingTensors tensors) {
  call_op(differentiable(stack, tensors) ? autograd : raw, "", stack);
}

const char* find_undefined(std::initializer_list<const char*> tensors, const StableIValue* stack) {
  for (const char* name : tensors) {
    bool defined = false;
    aoti_torch_is_defined(torch::stable::detail::to<AtenTensorHandle>(*stack++), &defined);
    if (!defined) return name;
  }
  return nullptr;
}

void fail_undefined(const char* op, const char* argument) {
  fail({"input", argument_text(op, argument), "is missing", "a tensor", "None", ""});
}

Tensor draw_seed(AtenTensorHandle like) {
  int32_t type = 0, index = 0;
  if (aoti_torch_get_device_type(like, &type) != AOTI_TORCH_SUCCESS ||
      aoti_torch_get_device_index(like, &index) != AOTI_TORCH_SUCCESS) {
    fail({"input", "a tensor argument", "could not be read", "a defined tensor", "", ""});
  }
  const torch::stable::Device device(static_cast<torch::headeronly::DeviceType>(type), index);
  return call_tensor_op("aten::randint", "", int64_t{INT64_MAX}, std::vector<int64_t>{1},
                        std::optional<ScalarType>(ScalarType::Long), std::nullopt,
                        std::optional<torch::stable::Device>(device), std::nullopt);
}

}  // namespace torch_cubin
