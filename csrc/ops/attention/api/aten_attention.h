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

#include "pytorch/tensor.h"

namespace torch_cubin {

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
