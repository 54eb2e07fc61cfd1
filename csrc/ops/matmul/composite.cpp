// The public ops linear and addmm.dtype; ops/common/dispatch.h has the rules for such ops.
#include <torch/csrc/stable/tensor.h>

#include <string_view>

#include "ops/common/dispatch.h"
#include "ops/matmul/matmul.h"

namespace torch_cubin {

using torch::stable::detail::to;

namespace {

// Whether it is "none". Borrows the argument.
bool says_none(StableIValue activation) {
  const StringHandle handle = to<StringHandle>(activation);
  const char* text = nullptr;
  size_t length = 0;
  return torch_string_c_str(handle, &text) == AOTI_TORCH_SUCCESS &&
         torch_string_length(handle, &length) == AOTI_TORCH_SUCCESS &&
         std::string_view(text, length) == "none";
}

}  // namespace

void linear_composite(StableIValue* stack, uint64_t, uint64_t) {
  call_with_tensors("linear", {"input", "weight"}, stack, [stack] {
    if (says_none(stack[3])) {
      torch_delete_string(to<StringHandle>(stack[3]));
      return call_by_grad_mode("cubin::_linear", "cubin::_linear_autograd", stack, {2, 1});
    }
    call_by_grad_mode("cubin::_linear_activation", "cubin::_linear_activation_autograd", stack,
                      {2, 1});
  });
}

void addmm_dtype_composite(StableIValue* stack, uint64_t, uint64_t) {
  call_with_tensors("addmm", {"input", "mat1", "mat2"}, stack, [stack] {
    call_by_grad_mode("cubin::_addmm_dtype", "cubin::_addmm_dtype_autograd", stack, {3, 0});
  });
}

}  // namespace torch_cubin
