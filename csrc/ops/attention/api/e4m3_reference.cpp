// Attention of float8_e4m3fn on the CPU: its numbers times their factors in float32, and the
// reference of attention (reference.cpp). For development and tests, no more.

#include <algorithm>
#include <vector>

#include "ops/attention/api/attention.h"
#include "ops/attention/problem/fused_operands.h"
#include "ops/attention/problem/operands.h"
#include "ops/common/aten.h"
#include "ops/common/dispatch.h"
#include "ops/common/stable_ops.h"

namespace torch_cubin {
namespace {

Tensor times(const Tensor& tensor, const Tensor& factors) {
  return call_tensor_op("aten::mul", "Tensor", tensor, factors);
}

// `tensor` in float32, times `descale`, of which each entry is for `group` heads.
Tensor dequantised(const Tensor& tensor, const OptionalTensor& descale, int64_t group,
                   const OptionalTensor& cu_seqlens) {
  Tensor wide = torch::stable::to(detach(tensor), ScalarType::Float);
  if (!descale) return wide;
  const Tensor factors = call_tensor_op("aten::repeat_interleave", "self_int", detach(*descale),
                                        group, std::optional<int64_t>(1), std::nullopt);
  if (!cu_seqlens)
    return times(wide, torch::stable::unsqueeze(torch::stable::unsqueeze(factors, 2), 3));
  const Tensor all = torch::stable::contiguous(*cu_seqlens);
  const auto* offsets = static_cast<const int32_t*>(all.data_ptr());
  const int64_t rows = TensorView(wide).sizes[0];
  for (int64_t b = 0; b + 1 < TensorView(all).sizes[0]; ++b) {
    // Offsets that are none are refused later, by the reference.
    const int64_t begin = std::clamp<int64_t>(offsets[b], 0, rows);
    const int64_t end = std::clamp<int64_t>(offsets[b + 1], begin, rows);
    Tensor place = torch::stable::narrow(wide, 0, begin, end - begin);
    Tensor own = factors;
    own = torch::stable::unsqueeze(torch::stable::narrow(own, 0, b, 1), 2);
    torch::stable::copy_(place, times(place, own));
  }
  return wide;
}

}  // namespace

std::tuple<Tensor, Tensor> attention_forward_e4m3_cpu(const Tensor& query, const Tensor& key,
                                                      const Tensor& value, TC_E4M3_ARGUMENTS) {
  const AttentionCall call("attention_forward_e4m3", query, key, value, TC_E4M3_OPTIONS);
  const AttentionShape& shape = call.shape;
  const auto [computed, logsumexp] = attention_forward_cpu(
      dequantised(query, q_descale, shape.group(), cu_seqlens_q),
      dequantised(key, k_descale, 1, cu_seqlens_k), dequantised(value, v_descale, 1, cu_seqlens_k),
      std::nullopt, 0.0, is_causal, std::nullopt, scale, true, window_left, window_right,
      bottom_right, 0.0, std::nullopt, std::nullopt, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
      max_seqlen_k);
  const TensorView q(query);
  int64_t strides[kMaxDims];
  output_strides(q, shape.out, strides);
  Tensor out = empty_near(q, shape.out.sizes, shape.out.dim, call.out_dtype, strides);
  torch::stable::copy_(out, computed);
  return {out, logsumexp};
}

}  // namespace torch_cubin
