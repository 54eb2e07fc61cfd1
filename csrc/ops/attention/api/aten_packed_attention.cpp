#include "ops/attention/api/aten_packed_attention.h"

#include <algorithm>

#include "ops/attention/api/aten_attention.h"
#include "ops/attention/api/attention.h"
#include "ops/attention/problem/arguments.h"
#include "ops/common/batch_invariant.h"
#include "ops/common/serving.h"
#include "pytorch/aten_kernels.h"

namespace torch_cubin {
namespace {

// Below this number of keys in all, PyTorch's kernel was quicker on an H200: it needs one launch,
// ours three. 8 x 200 had 0.70 of its speed, 64 of 32 to 158 (6,080) 1.04, 16 x 512 1.38.
constexpr int64_t kFewPackedKeys = 8192;

// The arguments that forward and backward share.
struct PackedCall {
  const Tensor &query, &key, &value;
  const Tensor &cum_seq_q, &cum_seq_k;  // defined
  int64_t max_q, max_k;
  double dropout_p;
  bool is_causal;
  std::optional<double> scale;
  GivenSize window_left, window_right;
};

const char* why_not_offsets(const TensorView& q, const TensorView& ends_q,
                            const TensorView& ends_k) {
  if (ends_q.dtype != ScalarType::Int || ends_k.dtype != ScalarType::Int) {
    return "offsets that are not int32";
  }
  const bool fits = ends_q.dim == 1 && ends_k.dim == 1 && ends_q.sizes[0] == ends_k.sizes[0] &&
                    same_device(q, ends_q) && same_device(q, ends_k);
  if (!fits) return "offsets of other shapes or devices";
  return ends_q.sizes[0] < 2 ? "no sequence" : nullptr;
}

const char* why_not(Policy policy, const PackedCall& call) {
  const TensorView q(call.query), k(call.key), v(call.value);
  if (call.dropout_p > 0) return "dropout, whose numbers PyTorch's backward draws again";
  if (!is_16_bit(q.dtype)) return "a dtype that is not float16 or bfloat16";
  if (k.dtype != q.dtype || v.dtype != q.dtype) return "different dtypes";
  if (q.dim != 3 || k.dim != 3 || v.dim != 3) return "a rank that is not 3";
  if (const char* reason = why_not_tensor(q, CallKind::kAttention, policy)) return reason;
  const bool fits = std::equal(k.sizes, k.sizes + 3, v.sizes) && q.sizes[2] == k.sizes[2] &&
                    heads_divide(q.sizes[1], k.sizes[1]) && same_device(q, k) && same_device(q, v);
  if (!fits) return "shapes that it does not take";
  if (q.sizes[2] > kFlashHeadDim) return "a head_dim above 256";
  if (q.sizes[0] == 0 || k.sizes[0] == 0) return "no rows or no keys";
  if (policy == Policy::kFastest && k.sizes[0] < kFewPackedKeys) {
    return "fewer than 8192 keys, which is not known to be quicker";
  }
  return why_not_offsets(q, TensorView(call.cum_seq_q), TensorView(call.cum_seq_k));
}

const char* why_not_packed_sums(const PackedCall& call, const Tensor& logsumexp) {
  const TensorView q(call.query), sums(logsumexp);
  const bool fits = sums.dim == 2 && sums.dtype == ScalarType::Float &&
                    sums.sizes[0] == q.sizes[1] && sums.sizes[1] == q.sizes[0];
  return fits ? nullptr : "a logsumexp of another layout";
}

AttentionArguments packed_arguments(const char* op, const PackedCall& call) {
  AttentionArguments arguments = {op, call.query, call.key, call.value, {}};
  AttentionOptions& options = arguments.options;
  options.is_causal = call.is_causal;
  options.scale = call.scale;
  options.enable_gqa = true;
  options.bottom_right = true;
  // PyTorch's negative sizes are all -1 here.
  options.window_left = std::max<int64_t>(call.window_left.value_or(-1), -1);
  options.window_right = std::max<int64_t>(call.window_right.value_or(-1), -1);
  options.cu_seqlens_q = call.cum_seq_q;
  options.cu_seqlens_k = call.cum_seq_k;
  options.max_seqlen_q = call.max_q;
  options.max_seqlen_k = call.max_k;
  return arguments;
}

PackedResults serve(const AtenOp& op, const PackedCall& call) {
  const ServedCall served;
  const TensorView q(call.query);
  const auto run = q.on_cuda() ? &attention_forward_cuda : &attention_forward_cpu;
  auto [out, sums] = run(packed_arguments("attention_forward", call), true);
  mark_empty_rows(sums);
  op.count_served(q);
  return {laid_out_as(out, call.query), sums, vector(q, 2, ScalarType::UInt64),
          scalar(q, ScalarType::UInt64), vector(q, 0, q.dtype)};
}

AtenTensorHandle borrowed(const GivenTensor& tensor) { return tensor ? tensor->get() : nullptr; }

bool is_packed(const GivenTensor& cum_seq_q, const GivenTensor& cum_seq_k) {
  return cum_seq_q && cum_seq_k && is_defined(*cum_seq_q) && is_defined(*cum_seq_k);
}

}  // namespace

PackedResults aten_paged_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const GivenTensor& cum_seq_q, const GivenTensor& cum_seq_k,
                                   int64_t max_q, int64_t max_k, double dropout_p, bool is_causal,
                                   bool return_debug_mask, std::optional<double> scale,
                                   GivenSize window_left, GivenSize window_right,
                                   const GivenTensor& seqused_k, const GivenTensor& alibi_slopes,
                                   const GivenTensor& block_table, GivenSize num_splits) {
  static const AtenOp op("aten::_flash_attention_forward", CallKind::kAttention);
  const Policy policy = serving_policy();
  if (policy != Policy::kOff && is_packed(cum_seq_q, cum_seq_k)) {
    const PackedCall call{query, key,       value,     *cum_seq_q, *cum_seq_k,  max_q,
                          max_k, dropout_p, is_causal, scale,      window_left, window_right};
    const char* reason = why_not(policy, call);
    if (return_debug_mask) reason = "return_debug_mask";
    if (seqused_k || alibi_slopes || block_table) reason = "seqused_k, alibi_slopes or block_table";
    // The same bits, whatever the batch.
    if (num_splits.value_or(0) == 1 && !batch_invariant()) reason = "num_splits=1";
    if (serves_attention(op, reason)) return serve(op, call);
  }
  AtenTensorHandle tensors[] = {borrowed(cum_seq_q), borrowed(cum_seq_k), borrowed(seqused_k),
                                borrowed(alibi_slopes), borrowed(block_table)};
  const auto given = [&](int i) { return tensors[i] ? &tensors[i] : nullptr; };
  AtenTensorHandle made[5] = {};
  const AtenAttentions& aten = aten_attentions();
  const auto call = [&](const auto function, const auto... later) {
    check_aten(function(query.get(), key.get(), value.get(), given(0), given(1), max_q, max_k,
                        dropout_p, is_causal, return_debug_mask, pointer_to(scale),
                        pointer_to(window_left), pointer_to(window_right), given(2), given(3),
                        later..., &made[0], &made[1], &made[2], &made[3], &made[4]),
               op.name);
  };
  if (aten.paged != nullptr) {
    call(aten.paged, given(4), pointer_to(num_splits));
  } else {
    call(present(aten.packed, op));
  }
  return {Tensor(made[0]), Tensor(made[1]), Tensor(made[2]), Tensor(made[3]), Tensor(made[4])};
}

PackedResults aten_packed_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const GivenTensor& cum_seq_q, const GivenTensor& cum_seq_k,
                                    int64_t max_q, int64_t max_k, double dropout_p, bool is_causal,
                                    bool return_debug_mask, std::optional<double> scale,
                                    GivenSize window_left, GivenSize window_right,
                                    const GivenTensor& seqused_k, const GivenTensor& alibi_slopes) {
  return aten_paged_attention(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                              is_causal, return_debug_mask, scale, window_left, window_right,
                              seqused_k, alibi_slopes, std::nullopt, std::nullopt);
}

ThreeTensors aten_packed_attention_backward(const Tensor& grad_out, const Tensor& query,
                                            const Tensor& key, const Tensor& value,
                                            const Tensor& out, const Tensor& logsumexp,
                                            const Tensor& cum_seq_q, const Tensor& cum_seq_k,
                                            int64_t max_q, int64_t max_k, double dropout_p,
                                            bool is_causal, const Tensor& rng_state,
                                            const Tensor& unused, std::optional<double> scale,
                                            GivenSize window_left, GivenSize window_right) {
  static const AtenOp op("aten::_flash_attention_backward", CallKind::kAttention);
  const Policy policy = serving_policy();
  if (policy != Policy::kOff && is_defined(grad_out) && is_packed(cum_seq_q, cum_seq_k)) {
    const PackedCall call{query, key,       value,     cum_seq_q, cum_seq_k,   max_q,
                          max_k, dropout_p, is_causal, scale,     window_left, window_right};
    const char* reason = why_not(policy, call);
    if (reason == nullptr) reason = why_not_packed_sums(call, logsumexp);
    if (serves_attention(op, reason)) {
      const ServedCall served;
      const TensorView q(query);
      const auto run = q.on_cuda() ? &attention_backward_cuda : &attention_backward_cpu;
      const auto [dq, dk, dv] =
          run(packed_arguments("attention_backward", call), grad_out, out, logsumexp);
      op.count_served(q);
      return {laid_out_as(dq, query), laid_out_as(dk, key), laid_out_as(dv, value)};
    }
  }
  AtenTensorHandle made[3] = {};
  const auto call = present(aten_attentions().packed_backward, op);
  check_aten(call(grad_out.get(), query.get(), key.get(), value.get(), out.get(), logsumexp.get(),
                  cum_seq_q.get(), cum_seq_k.get(), max_q, max_k, dropout_p, is_causal,
                  rng_state.get(), unused.get(), pointer_to(scale), pointer_to(window_left),
                  pointer_to(window_right), &made[0], &made[1], &made[2]),
             op.name);
  return {Tensor(made[0]), Tensor(made[1]), Tensor(made[2])};
}

}  // namespace torch_cubin
