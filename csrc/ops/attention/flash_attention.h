// The public op flash_attention: other layouts of the same attention.
#pragma once

#include <cstdint>
#include <optional>

#include "ops/attention/attention.h"

namespace torch_cubin {

// Throws [input] where a rank or the packing is wrong; attention_forward checks the rest.
Tensor flash_attention(const Tensor& query, const OptionalTensor& key, const OptionalTensor& value,
                       bool is_causal, std::optional<double> scale, int64_t window_left,
                       int64_t window_right, bool bottom_right, double softcap,
                       const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                       const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                       int64_t max_seqlen_q, int64_t max_seqlen_k, double dropout_p);

}  // namespace torch_cubin
