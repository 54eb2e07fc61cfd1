#include "ops/attention/fused_operands.h"

#include <utility>

#include "cubin/error.h"
#include "ops/attention/operands.h"
#include "ops/common/stable_ops.h"

namespace torch_cubin {

AttentionCall::AttentionCall(const char* op, const Tensor& query, const Tensor& key,
                             const Tensor& value, AttentionOptions all)
    : options(std::move(all)) {
  const TensorView q(query);
  const AttentionViews views = views_of(options);
  shape = check_attention(op, q, TensorView(key), TensorView(value), options, views);
  settings = attention_settings(op, shape, options, views);
  dtype = q.dtype;
  out_dtype = options.e4m3 ? ScalarType::BFloat16 : dtype;
  device_index = q.device_index;
}

FusedOperands::FusedOperands(const AttentionCall& call, const Tensor& q, const Tensor& k,
                             const Tensor& v)
    : call(call),
      query(vector_rows(q)),
      key(vector_rows(repeat_heads(k, call.shape))),
      value(vector_rows(repeat_heads(v, call.shape))),
      slopes(contiguous(call.options.alibi_slopes)),
      sinks(contiguous(call.options.sinks)),
      cu_seqlens_q(contiguous(call.options.cu_seqlens_q)),
      cu_seqlens_k(contiguous(call.options.cu_seqlens_k)),
      problem(call.shape),
      one_launch(call.settings.drop_below > 0 && call.shape.batch.dim > 1) {
  OptionalTensor mask = call.options.attn_mask;
  if (one_launch) {
    const auto copied = [&](const Tensor& tensor, int64_t heads) {
      return torch::stable::contiguous(expand_leading(tensor, call.shape, heads));
    };
    query = copied(query, call.shape.heads);
    key = copied(key, call.shape.kv_heads);
    value = copied(value, call.shape.kv_heads);
    if (mask) mask = torch::stable::contiguous(expand_mask(*mask, call.shape));
  }
  problem.add(kQuery, TensorView(query));
  problem.add(kKey, TensorView(key));
  problem.add(kValue, TensorView(value));
  if (mask) problem.add(kMask, TensorView(*mask));
  mask_ = mask;
}

AttentionParams FusedOperands::params(int64_t head_dim, int64_t head_dim_v) const {
  const AttentionSettings& s = call.settings;
  AttentionParams p{};
  p.head_dim = static_cast<int>(head_dim);
  p.head_dim_v = static_cast<int>(head_dim_v);
  p.first = s.first;
  p.last = s.last;
  p.splits = 1;
  p.scale = static_cast<float>(s.scale);
  p.softcap = static_cast<float>(s.softcap);
  p.keep_scale = static_cast<float>(s.keep_scale);
  p.drop_below = s.drop_below;
  if (s.bottom_right) p.flags |= kAttendBottomRight;
  if (s.drop_below > 0) {
    p.flags |= kAttendDropout;
    p.dropout_seed = static_cast<const tc_int64*>(call.options.dropout_seed->data_ptr());
  }
  if (mask_) {
    const ScalarType dtype = TensorView(*mask_).dtype;
    p.flags |= dtype == ScalarType::Bool    ? kAttendBoolMask
               : dtype == ScalarType::Float ? kAttendFloatMask
                                            : kAttendOwnMask;
  }
  if (slopes && TensorView(*slopes).dim == 2) p.alibi_stride = call.shape.heads;
  if (sinks) p.sinks = static_cast<const float*>(sinks->data_ptr());
  if (cu_seqlens_q) p.cu_seqlens_q = static_cast<const int*>(cu_seqlens_q->data_ptr());
  if (cu_seqlens_k) p.cu_seqlens_k = static_cast<const int*>(cu_seqlens_k->data_ptr());
  return p;
}

void FusedOperands::fill(AttentionParams& p, int64_t part) const {
  problem.fill(p, part);
  if (!slopes) return;
  p.alibi_slopes =
      static_cast<const float*>(slopes->data_ptr()) + part * problem.batch() * p.alibi_stride;
}

ComposeInputs compose_inputs(const AttentionCall& call, const Tensor& query, const Tensor& key,
                             const Tensor& value) {
  const AttentionShape& shape = call.shape;
  if (shape.packed) {
    fail({"no_kernel", "attention over packed sequences", "has no kernel for these tensors",
          "float16, bfloat16 or float32 and a head_dim that a fused kernel takes",
          dtype_name(call.dtype) + ", head_dim " + std::to_string(shape.head_dim) + " and " +
              std::to_string(shape.head_dim_v),
          "Call it once a sequence."});
  }
  const int64_t batch = shape.batch.numel();
  const auto merged = [&](const Tensor& tensor, int64_t heads, int64_t rows, int64_t columns) {
    return torch::stable::reshape(expand_leading(tensor, shape, heads),
                                  {batch, heads, rows, columns});
  };
  ComposeInputs inputs;
  inputs.query = merged(query, shape.heads, shape.seqlen_q, shape.head_dim);
  inputs.key = merged(repeat_heads(key, shape), shape.kv_heads, shape.seqlen_k, shape.head_dim);
  inputs.value =
      merged(repeat_heads(value, shape), shape.kv_heads, shape.seqlen_k, shape.head_dim_v);
  if (call.options.attn_mask) {
    inputs.mask = torch::stable::reshape(expand_mask(*call.options.attn_mask, shape),
                                         {batch, shape.heads, shape.seqlen_q, shape.seqlen_k});
  }
  inputs.alibi_slopes = contiguous(call.options.alibi_slopes);
  inputs.sinks = contiguous(call.options.sinks);
  inputs.dropout_seed = call.options.dropout_seed;
  return inputs;
}

std::tuple<Tensor, Tensor, Tensor> compose_gradients(const AttentionCall& call,
                                                     const Tensor& grad_out, const Tensor& query,
                                                     const Tensor& key, const Tensor& value,
                                                     const Tensor& out, const Tensor& logsumexp) {
  const AttentionShape& shape = call.shape;
  const ComposeInputs in = compose_inputs(call, query, key, value);
  const std::vector<int64_t> rows = {TensorView(in.query).sizes[0], shape.heads, shape.seqlen_q};
  std::vector<int64_t> wide = rows;
  wide.push_back(shape.head_dim_v);
  const auto [dq, dk, dv] =
      compose_backward(in, call.settings, torch::stable::reshape(grad_out, wide),
                       torch::stable::reshape(out, wide), torch::stable::reshape(logsumexp, rows));
  return {sum_to_operand(dq, shape, TensorView(query)), sum_to_operand(dk, shape, TensorView(key)),
          sum_to_operand(dv, shape, TensorView(value))};
}

}  // namespace torch_cubin
