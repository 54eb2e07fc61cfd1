// Attention on the CPU: the composition (compose.h), whose parts are references there. For
// development and tests, no more.
//
// NOTE: ATen's scaled_dot_product_attention knows neither our options nor our seed for dropout, and
// tells no logsumexp.
#include <limits>
#include <vector>

#include "cubin/error.h"
#include "ops/attention/api/attention.h"
#include "ops/attention/compose/compose.h"
#include "ops/attention/problem/operands.h"
#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"

namespace torch_cubin {
namespace {

OptionalTensor detach_optional(const OptionalTensor& tensor) {
  if (!tensor) return std::nullopt;
  return detach(*tensor);
}

AttentionOptions detached(AttentionOptions options) {
  options.attn_mask = detach_optional(options.attn_mask);
  options.alibi_slopes = detach_optional(options.alibi_slopes);
  options.sinks = detach_optional(options.sinks);
  return options;
}

// `computed` (the same numbers in any shape) as a fresh tensor of `dtype`, laid out like `like`.
Tensor laid_out(const Tensor& computed, const Shape& sizes, const TensorView& like,
                ScalarType dtype) {
  int64_t strides[kMaxDims];
  output_strides(like, sizes, strides);
  Tensor out = empty_near(like, sizes.sizes, sizes.dim, dtype, strides);
  torch::stable::copy_(out, torch::stable::reshape(computed, sizes.vector()));
  return out;
}

struct Forward {
  Tensor out, logsumexp;
};

Forward forward_dense(const AttentionCall& call, const Tensor& query, const Tensor& key,
                      const Tensor& value) {
  const AttentionShape& shape = call.shape;
  if ((shape.seqlen_k == 0 || shape.kv_heads == 0) && !call.options.sinks) {
    const std::vector<int64_t> out = shape.out.vector();
    const std::vector<int64_t> rows(out.begin(), out.end() - 1);
    Tensor logsumexp = torch::stable::new_empty(query, rows, sums_dtype(call.dtype));
    torch::stable::fill_(logsumexp, -std::numeric_limits<double>::infinity());
    return {torch::stable::new_zeros(query, out), logsumexp};
  }
  const auto [out, logsumexp] =
      compose_forward(compose_inputs(call, query, key, value), call.settings, true);
  return {out, logsumexp};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor>;  // of query, key and value

Gradients zeros_like(const Tensor& query, const Tensor& key, const Tensor& value) {
  const auto zeros = [](const Tensor& like) {
    return torch::stable::new_zeros(like, sizes_of(TensorView(like)));
  };
  return {zeros(query), zeros(key), zeros(value)};
}

Gradients backward_dense(const AttentionCall& call, const Tensor& grad_out, const Tensor& query,
                         const Tensor& key, const Tensor& value, const Tensor& out,
                         const Tensor& logsumexp) {
  const AttentionShape& shape = call.shape;
  if (shape.logsumexp.numel() == 0 || shape.seqlen_k == 0 || shape.kv_heads == 0) {
    return zeros_like(query, key, value);
  }
  return compose_gradients(call, grad_out, query, key, value, out, logsumexp);
}

// Where each packed sequence begins, and where the last ends.
std::vector<int64_t> offsets(const OptionalTensor& cu_seqlens, const Tensor& packed,
                             const char* name) {
  const Tensor all = torch::stable::contiguous(*cu_seqlens);
  const auto* data = static_cast<const int32_t*>(all.data_ptr());
  const int64_t rows = TensorView(packed).sizes[0];
  std::vector<int64_t> out(data, data + TensorView(all).sizes[0]);
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i] < (i > 0 ? out[i - 1] : 0) || out[i] > rows) {
      fail({"input", std::string("attention argument '") + name + "'", "is no list of offsets",
            "0 to " + std::to_string(rows) + ", ascending", std::to_string(out[i]), ""});
    }
  }
  return out;
}

// One of the packed sequences: its rows, as (1, heads, rows, columns), and its options.
struct Sequence {
  int64_t q_begin, q_rows, k_begin, k_rows;
  AttentionOptions options;

  static Tensor slice(const Tensor& packed, int64_t begin, int64_t rows) {
    Tensor all = packed;
    return torch::stable::unsqueeze(
        torch::stable::transpose(torch::stable::narrow(all, 0, begin, rows), 0, 1), 0);
  }
  Tensor of_query(const Tensor& packed) const { return slice(packed, q_begin, q_rows); }
  Tensor of_key(const Tensor& packed) const { return slice(packed, k_begin, k_rows); }

  // (1, heads, rows, columns) back to its place.
  static void put(Tensor& packed, int64_t begin, int64_t rows, const Tensor& one) {
    Tensor all = packed, own = one;
    Tensor place = torch::stable::narrow(all, 0, begin, rows);
    torch::stable::copy_(place, torch::stable::transpose(torch::stable::squeeze(own, 0), 0, 1));
  }
};

std::vector<Sequence> sequences(const AttentionCall& call, const Tensor& query, const Tensor& key) {
  const auto q = offsets(call.options.cu_seqlens_q, query, "cu_seqlens_q");
  const auto k = offsets(call.options.cu_seqlens_k, key, "cu_seqlens_k");
  std::vector<Sequence> all;
  for (size_t b = 0; b + 1 < q.size(); ++b) {
    Sequence one = {q[b], q[b + 1] - q[b], k[b], k[b + 1] - k[b], call.options};
    one.options.cu_seqlens_q = one.options.cu_seqlens_k = std::nullopt;
    if (one.options.alibi_slopes && TensorView(*one.options.alibi_slopes).dim == 2) {
      one.options.alibi_slopes =
          torch::stable::select(*one.options.alibi_slopes, 0, static_cast<int64_t>(b));
    }
    all.push_back(std::move(one));
  }
  if (call.settings.drop_below > 0 && all.size() > 1) {
    fail({"input", "the CPU reference", "has no dropout for several packed sequences",
          "one sequence, or dropout_p = 0", std::to_string(all.size()) + " sequences", ""});
  }
  return all;
}

Forward forward_packed(const AttentionCall& call, const Tensor& query, const Tensor& key,
                       const Tensor& value) {
  const Shape& sizes = call.shape.out;
  Tensor out = torch::stable::new_zeros(query, sizes.vector());
  Tensor logsumexp =
      torch::stable::new_zeros(query, {call.shape.heads, sizes.sizes[0]}, sums_dtype(call.dtype));
  torch::stable::fill_(logsumexp, -std::numeric_limits<double>::infinity());
  for (const Sequence& one : sequences(call, query, key)) {
    const Tensor q = one.of_query(query), k = one.of_key(key), v = one.of_key(value);
    if (one.q_rows == 0) continue;
    const AttentionCall own("attention_forward", q, k, v, one.options);
    const Forward computed = forward_dense(own, q, k, v);
    Sequence::put(out, one.q_begin, one.q_rows, computed.out);
    Tensor place = torch::stable::narrow(logsumexp, 1, one.q_begin, one.q_rows);
    torch::stable::copy_(
        place, torch::stable::reshape(computed.logsumexp, {call.shape.heads, one.q_rows}));
  }
  return {out, logsumexp};
}

Gradients backward_packed(const AttentionCall& call, const Tensor& grad_out, const Tensor& query,
                          const Tensor& key, const Tensor& value, const Tensor& out,
                          const Tensor& logsumexp) {
  auto [dq, dk, dv] = zeros_like(query, key, value);
  for (const Sequence& one : sequences(call, query, key)) {
    if (one.q_rows == 0 || one.k_rows == 0) continue;
    const Tensor q = one.of_query(query), k = one.of_key(key), v = one.of_key(value);
    const AttentionCall own("attention_backward", q, k, v, one.options);
    Tensor rows = logsumexp;
    const auto [own_dq, own_dk, own_dv] =
        backward_dense(own, one.of_query(grad_out), q, k, v, one.of_query(out),
                       torch::stable::narrow(rows, 1, one.q_begin, one.q_rows));
    Sequence::put(dq, one.q_begin, one.q_rows, own_dq);
    Sequence::put(dk, one.k_begin, one.k_rows, own_dk);
    Sequence::put(dv, one.k_begin, one.k_rows, own_dv);
  }
  return {dq, dk, dv};
}

std::tuple<Tensor, Tensor> forward_on_cpu(const char* op, const Tensor& query, const Tensor& key,
                                          const Tensor& value, AttentionOptions options) {
  const Tensor q = detach(query), k = detach(key), v = detach(value);
  const AttentionCall call(op, q, k, v, detached(std::move(options)));
  const Forward computed =
      call.shape.packed ? forward_packed(call, q, k, v) : forward_dense(call, q, k, v);
  const Shape& rows = call.shape.logsumexp;
  Tensor logsumexp = empty_near(TensorView(q), rows.sizes, rows.dim, sums_dtype(call.dtype));
  torch::stable::copy_(logsumexp, torch::stable::reshape(computed.logsumexp, rows.vector()));
  return {laid_out(computed.out, call.shape.out, TensorView(q), call.dtype), logsumexp};
}

}  // namespace

Tensor scaled_dot_product_attention_cpu(const Tensor& query, const Tensor& key, const Tensor& value,
                                        const OptionalTensor& attn_mask, double dropout_p,
                                        bool is_causal, const OptionalTensor& dropout_seed,
                                        std::optional<double> scale, bool enable_gqa) {
  AttentionOptions options = {attn_mask, dropout_p, is_causal, dropout_seed, scale, enable_gqa};
  return std::get<0>(
      forward_on_cpu("scaled_dot_product_attention", query, key, value, std::move(options)));
}

std::tuple<Tensor, Tensor> attention_forward_cpu(const Tensor& query, const Tensor& key,
                                                 const Tensor& value, TC_ATTENTION_ARGUMENTS) {
  return forward_on_cpu("attention_forward", query, key, value, TC_ATTENTION_OPTIONS);
}

std::tuple<Tensor, Tensor, Tensor> attention_backward_cpu(const Tensor& grad_out,
                                                          const Tensor& query, const Tensor& key,
                                                          const Tensor& value, const Tensor& out,
                                                          const Tensor& logsumexp,
                                                          TC_ATTENTION_ARGUMENTS) {
  const Tensor q = detach(query), k = detach(key), v = detach(value), o = detach(out);
  const Tensor g = detach(grad_out), rows = detach(logsumexp);
  const AttentionCall call("attention_backward", q, k, v, detached(TC_ATTENTION_OPTIONS));
  check_attention_backward(call.shape, TensorView(q), TensorView(g), TensorView(o),
                           TensorView(rows));
  const auto [dq, dk, dv] = call.shape.packed ? backward_packed(call, g, q, k, v, o, rows)
                                              : backward_dense(call, g, q, k, v, o, rows);
  const auto finish = [&](const Tensor& grad, const Tensor& operand) {
    const TensorView view(operand);
    return laid_out(grad, shape_of(view), view, view.dtype);
  };
  return {finish(dq, q), finish(dk, k), finish(dv, v)};
}

}  // namespace torch_cubin
