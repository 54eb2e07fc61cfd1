#include "ops/common/aten.h"

#include <string>
#include <string_view>

#include "cubin/error.h"
#include "ops/common/stable_ops.h"
#include "pytorch/contiguous.h"
#include "pytorch/torch_error.h"

namespace torch_cubin {
namespace {

// `who`: "the CPU reference's aten::matmul".
[[noreturn]] void fail_by_pytorch(const std::string& who) {
  const std::string text = torch_error();
  const auto says = [&](const char* words) { return text.find(words) != std::string::npos; };
  if (says("CUDA out of memory")) fail_out_of_memory(who + " failed");
  const bool memory = says("allocate memory") || says("not enough memory") || says("[oom]");
  fail({memory ? "oom" : "internal", who, "failed", "a result", text.empty() ? "an error" : text,
        ""});
}

// The op in the text of a call: "aten::copy_", or "aten::narrow" of aoti_torch_aten_narrow(...).
std::string op_in(std::string_view call) {
  const auto from = [&](std::string_view word) {
    const size_t at = call.find(word);
    return at == std::string_view::npos ? std::string_view() : call.substr(at + word.size());
  };
  const auto until = [](std::string_view text, char end) {
    return std::string(text.substr(0, text.find(end)));
  };
  if (const auto found = from("\"aten::"); !found.empty()) return "aten::" + until(found, '"');
  if (const auto found = from("aoti_torch_aten_"); !found.empty()) {
    return "aten::" + until(found, '(');
  }
  return until(call, '(');
}

}  // namespace

Tensor call_aten_boxed(const char* op, const char* overload, StableIValue* stack) {
  if (torch_call_dispatcher(op, overload, stack, TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS) {
    fail_by_pytorch(std::string("the CPU reference's ") + op);
  }
  return torch::stable::detail::to<Tensor>(stack[0]);
}

bool aten_allclose(const Tensor& a, const Tensor& b, double atol) {
  constexpr double kRtol = 0;
  constexpr bool kEqualNan = true;
  StableIValue stack[] = {torch::stable::detail::from(a), torch::stable::detail::from(b),
                          torch::stable::detail::from(kRtol), torch::stable::detail::from(atol),
                          torch::stable::detail::from(kEqualNan)};
  if (torch_call_dispatcher("aten::allclose", "", stack, TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS) {
    fail_by_pytorch("PyTorch's aten::allclose");
  }
  return torch::stable::detail::to<bool>(stack[0]);
}

void fail_stable_op(const char* call) { fail_by_pytorch("PyTorch's " + op_in(call)); }

Tensor detach(const Tensor& tensor) { return call_aten("aten::detach", tensor); }

Tensor as_contiguous(const Tensor& tensor) {
  const TensorView view(tensor);
  const bool already = is_contiguous(view.sizes, view.strides, view.dim);
  return already ? tensor : torch::stable::contiguous(detach(tensor));
}

}  // namespace torch_cubin
