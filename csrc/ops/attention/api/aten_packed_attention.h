// PyTorch's attention of packed sequences as install() and drop_in() serve it, below autograd:
// aten::_flash_attention_forward and _flash_attention_backward with offsets, which
// torch.nn.attention.varlen and attention of nested tensors call. Without offsets they compute what
// PyTorch's own aten::_scaled_dot_product_flash_attention calls, which is left to it.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include "ops/attention/api/aten_attention.h"

namespace torch_cubin {

// out, logsumexp, rng_state, unused, debug_attn_mask
using PackedResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using GivenTensor = std::optional<Tensor>;
using GivenSize = std::optional<int64_t>;

PackedResults aten_packed_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const GivenTensor& cum_seq_q, const GivenTensor& cum_seq_k,
                                    int64_t max_q, int64_t max_k, double dropout_p, bool is_causal,
                                    bool return_debug_mask, std::optional<double> scale,
                                    GivenSize window_left, GivenSize window_right,
                                    const GivenTensor& seqused_k, const GivenTensor& alibi_slopes);
// From torch 2.12 on.
PackedResults aten_paged_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const GivenTensor& cum_seq_q, const GivenTensor& cum_seq_k,
                                   int64_t max_q, int64_t max_k, double dropout_p, bool is_causal,
                                   bool return_debug_mask, std::optional<double> scale,
                                   GivenSize window_left, GivenSize window_right,
                                   const GivenTensor& seqused_k, const GivenTensor& alibi_slopes,
                                   const GivenTensor& block_table, GivenSize num_splits);

ThreeTensors aten_packed_attention_backward(const Tensor& grad_out, const Tensor& query,
                                            const Tensor& key, const Tensor& value,
                                            const Tensor& out, const Tensor& logsumexp,
                                            const Tensor& cum_seq_q, const Tensor& cum_seq_k,
                                            int64_t max_q, int64_t max_k, double dropout_p,
                                            bool is_causal, const Tensor& rng_state,
                                            const Tensor& unused, std::optional<double> scale,
                                            GivenSize window_left, GivenSize window_right);

}  // namespace torch_cubin
