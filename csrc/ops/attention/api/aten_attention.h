// PyTorch's fused attention ops as install() and drop_in() serve them, below autograd:
// aten::_scaled_dot_product_{flash,efficient,cudnn}_attention, among which
// F.scaled_dot_product_attention chooses, and their backwards.
//
// A served forward returns what PyTorch's backward expects (shapes, strides, logsumexp), and a
// served backward accepts what PyTorch's forward saved: serving may be switched on or off between
// the two.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

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

using AtenAttentionResults =
    std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, Tensor, Tensor, Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

AtenAttentionResults aten_flash_attention(const Tensor& query, const Tensor& key,
                                          const Tensor& value, double dropout_p, bool is_causal,
                                          bool return_debug_mask, std::optional<double> scale);
ThreeTensors aten_flash_attention_backward(const Tensor& grad_out, const Tensor& query,
                                           const Tensor& key, const Tensor& value,
                                           const Tensor& out, const Tensor& logsumexp,
                                           const Tensor& cum_seq_q, const Tensor& cum_seq_k,
                                           int64_t max_q, int64_t max_k, double dropout_p,
                                           bool is_causal, const Tensor& seed, const Tensor& offset,
                                           std::optional<double> scale);

FourTensors aten_efficient_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                     const std::optional<Tensor>& bias, bool compute_logsumexp,
                                     double dropout_p, bool is_causal, std::optional<double> scale);
FourTensors aten_efficient_attention_backward(const Tensor& grad_out, const Tensor& query,
                                              const Tensor& key, const Tensor& value,
                                              const Tensor& bias, const Tensor& out,
                                              const Tensor& logsumexp, const Tensor& seed,
                                              const Tensor& offset, double dropout_p,
                                              const std::vector<bool>& wanted, bool is_causal,
                                              std::optional<double> scale);

AtenAttentionResults aten_cudnn_attention(const Tensor& query, const Tensor& key,
                                          const Tensor& value, const std::optional<Tensor>& bias,
                                          bool compute_logsumexp, double dropout_p, bool is_causal,
                                          bool return_debug_mask, std::optional<double> scale);
ThreeTensors aten_cudnn_attention_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& logsumexp, const Tensor& seed, const Tensor& offset,
    const Tensor& bias, const Tensor& cum_seq_q, const Tensor& cum_seq_k, int64_t max_q,
    int64_t max_k, double dropout_p, bool is_causal, std::optional<double> scale);

}  // namespace torch_cubin
