#include "ops/common/aten.h"

#include <string>

#include "cubin/error.h"
#include "pytorch/torch_error.h"

namespace torch_cubin {

Tensor call_aten_boxed(const char* op, StableIValue* stack) {
  if (torch_call_dispatcher(op, "", stack, TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS) {
    const std::string text = torch_error();
    const bool memory = text.find("allocate memory") != std::string::npos ||
                        text.find("not enough memory") != std::string::npos;
    fail({memory ? "oom" : "internal", std::string("the CPU reference's ") + op, "failed",
          "a result", text.empty() ? "an error" : text, ""});
  }
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor detach(const Tensor& tensor) { return call_aten("aten::detach", tensor); }

}  // namespace torch_cubin
