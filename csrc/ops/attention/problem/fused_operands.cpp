#include "ops/attention/problem/fused_operands.h"

#include <utility>

#include "ops/attention/problem/operands.h"
#include "ops/common/stable_ops.h"

namespace torch_cubin {

AttentionCall::AttentionCall(AttentionArguments arguments)
    : AttentionArguments(std::move(arguments)),
      q(query),
      k(key),
      v(value),
      views(views_of(options)) {
  shape = check_attention(op, q, k, v, views);
  settings = attention_settings(op, shape, views);
  dtype = q.dtype;
  out_dtype = options.e4m3 ? ScalarType::BFloat16 : dtype;
  device_index = q.device_index;
}

FusedOperands::FusedOperands(const AttentionCall& call)
    : call(call),
      query(vector_rows(call.query)),
      key(vector_rows(repeat_heads(call.key, call.shape))),
      value(vector_rows(repeat_heads(call.value, call.shape))),
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

void fill_settings(AttentionParams& params, const AttentionSettings& settings) {
  params.first = settings.first;
  params.last = settings.last;
  if (settings.bottom_right) params.flags |= kAttendBottomRight;
  copy_score_numbers(params, settings, [](double x) { return static_cast<float>(x); });
  params.drop_below = settings.drop_below;
}

AttentionParams FusedOperands::params(int64_t head_dim, int64_t head_dim_v) const {
  AttentionParams p{};
  fill_settings(p, call.settings);
  p.head_dim = static_cast<int>(head_dim);
  p.head_dim_v = static_cast<int>(head_dim_v);
  p.splits = 1;
  if (p.drop_below > 0) {
    p.flags |= kAttendDropout;
    p.dropout_seed = static_cast<const tc_int64*>(call.options.dropout_seed->data_ptr());
  }
  if (call.views.attn_mask) {
    const ScalarType dtype = call.views.attn_mask->dtype;
    p.flags |= dtype == ScalarType::Bool    ? kAttendBoolMask
               : dtype == ScalarType::Float ? kAttendFloatMask
                                            : kAttendOwnMask;
  }
  if (slopes && call.views.alibi_slopes->dim == 2) p.alibi_stride = call.shape.heads;
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

}  // namespace torch_cubin
