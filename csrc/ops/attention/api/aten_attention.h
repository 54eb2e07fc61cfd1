// PyTorch's fused attention ops as install(), drop_in() and the flash attention "cubin" serve them,
// below autograd: aten::_scaled_dot_product_{flash,efficient,cudnn}_attention, among which
// F.scaled_dot_product_attention chooses, aten::_flash_attention_*, and their backwards.
//
// A served forward returns what PyTorch's backward expects (shapes, strides, logsumexp), and a
// served backward accepts what PyTorch's forward saved: serving may be switched on or off between
// the two.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>

#include "cubin/error.h"
#include "ops/attention/problem/arguments.h"
#include "ops/common/over_aten.h"
#include "ops/common/serving.h"
#include "pytorch/aten_kernels.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// Register the kernels of PyTorch's operators for a dispatch key, if PyTorch has what serves the
// calls that they leave to it (a CPU build has nothing of it; there tests call ours).
void register_aten_attention(StableLibrary& library, bool on_cuda);
// `arguments` is the number of those of aten::_flash_attention_forward in this PyTorch, `into` that
// of the variant with an output, or 0. An operator with another number is left to PyTorch.
void register_aten_flash_attention(StableLibrary& library, bool on_cuda, int arguments, int into);

// --- for both files ---

using GivenTensor = std::optional<Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;
using AtenAttentionResults =
    std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, Tensor, Tensor, Tensor>;

constexpr const char* kDropoutReason = "dropout, whose numbers PyTorch's backward draws again";

// The widest head that PyTorch's flash attention and cuDNN support.
constexpr int64_t kFlashHeadDim = 256;

inline bool is_16_bit(ScalarType dtype) {
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
}

// Whether the policy serves the call; counts the call as declined if there is a reason.
bool serves_attention(const AtenOp& op, const char* reason);

// Our forward and backward of the arguments, counted.
std::tuple<Tensor, Tensor> serve_forward(const AtenOp& op, AttentionArguments arguments);
ThreeTensors serve_backward(const AtenOp& op, AttentionArguments arguments, const Tensor& grad_out,
                            const Tensor& out, const Tensor& logsumexp);

// `result` itself if it has these strides, else a copy that has them.
Tensor with_strides(const Tensor& result, const int64_t* strides);

// `result` with the strides of torch.empty_like(like), which has the same sizes.
Tensor laid_out_as(const Tensor& result, const Tensor& like);

// PyTorch's kernels write inf for rows that see no key; ours write -inf.
void mark_empty_rows(Tensor& logsumexp);

// Uninitialised, on the device of `like`.
Tensor scalar(const TensorView& like, ScalarType dtype);
Tensor vector(const TensorView& like, int64_t size, ScalarType dtype);

// An argument as PyTorch's C functions take it: a tensor's handle, of optional ones a pointer.
template <class T>
struct Passed {
  T value;
  T get() const { return value; }
};
template <>
struct Passed<Tensor> {
  const Tensor& value;
  AtenTensorHandle get() const { return value.get(); }
};
template <class T>
struct Passed<std::optional<T>> {
  std::optional<T> value;
  T* get() { return value ? &*value : nullptr; }
};
template <>
struct Passed<std::optional<Tensor>> {
  explicit Passed(const GivenTensor& tensor) : handle(tensor ? tensor->get() : nullptr) {}
  AtenTensorHandle handle;
  AtenTensorHandle* get() { return handle ? &handle : nullptr; }
};

// A function of PyTorch's that takes `args` and pointers to its results, which are returned.
// Throws [no_kernel] on a CPU build, which has none.
template <class Function, class... Args, class... Results>
void call_pytorch(const AtenOp& op, Function function, std::tuple<Results*...> results,
                  const Args&... args) {
  if (function == nullptr) {
    fail({"no_kernel", op.name, "is a call that only PyTorch could serve",
          "a CUDA build of PyTorch", "none of its kernels", ""});
  }
  const ServedCall pytorchs;  // the operators that it calls come here, and are PyTorch's too
  const auto call = [&](auto*... all) {
    check_aten(function(Passed<Args>{args}.get()..., all...), op.name);
  };
  std::apply(call, results);
}

template <size_t... I, class Function, class... Args>
auto tensors_of_pytorch(std::index_sequence<I...>, const AtenOp& op, Function function,
                        const Args&... args) {
  AtenTensorHandle made[sizeof...(I)] = {};
  call_pytorch(op, function, std::make_tuple(&made[I]...), args...);
  return std::make_tuple(Tensor(made[I])...);
}

// The tensors that PyTorch's own kernel returns.
template <size_t kResults, class Function, class... Args>
auto tensors_of_pytorch(const AtenOp& op, Function function, const Args&... args) {
  return tensors_of_pytorch(std::make_index_sequence<kResults>(), op, function, args...);
}

// The same for the operators that return two numbers among them.
template <class Function, class... Args>
AtenAttentionResults results_of_pytorch(const AtenOp& op, Function function, const Args&... args) {
  AtenTensorHandle made[7] = {};
  int64_t max_q = 0, max_k = 0;
  call_pytorch(op, function,
               std::make_tuple(&made[0], &made[1], &made[2], &made[3], &max_q, &max_k, &made[4],
                               &made[5], &made[6]),
               args...);
  return {Tensor(made[0]), Tensor(made[1]), Tensor(made[2]), Tensor(made[3]), max_q,
          max_k,           Tensor(made[4]), Tensor(made[5]), Tensor(made[6])};
}

}  // namespace torch_cubin
