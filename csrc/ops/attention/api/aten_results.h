// What our kernels of PyTorch's fused attention ops share: the results that PyTorch's backwards
// expect, and the calls that are left to PyTorch.
#pragma once

#include "cubin/error.h"
#include "ops/common/serving.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// The widest head that PyTorch's flash attention and cuDNN support.
constexpr int64_t kFlashHeadDim = 256;

inline bool is_16_bit(ScalarType dtype) {
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
}

// Whether the policy serves the call; counts the call as declined if there is a reason.
bool serves_attention(const AtenOp& op, const char* reason);

// `result` itself if it has these strides, else a copy that has them.
Tensor with_strides(const Tensor& result, const int64_t* strides);

// `result` with the strides of torch.empty_like(like), which has the same sizes.
Tensor laid_out_as(const Tensor& result, const Tensor& like);

// PyTorch's kernels write inf for rows that see no key; ours write -inf.
void mark_empty_rows(Tensor& logsumexp);

// Uninitialised, on the device of `like`.
Tensor scalar(const TensorView& like, ScalarType dtype);
Tensor vector(const TensorView& like, int64_t size, ScalarType dtype);

// The function of PyTorch's. Throws [no_kernel] on a CPU build, which has none.
template <class Function>
Function present(Function function, const AtenOp& op) {
  if (function != nullptr) return function;
  fail({"no_kernel", op.name, "is a call that only PyTorch could serve", "a CUDA build of PyTorch",
        "none of its kernels", ""});
}

template <class T>
T* pointer_to(std::optional<T>& value) {
  return value ? &*value : nullptr;
}

}  // namespace torch_cubin
