#include "ops/attention/api/aten_attention.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "ops/attention/api/attention.h"
#include "ops/common/stable_ops.h"

namespace torch_cubin {

bool serves_attention(const AtenOp& op, const char* reason) {
  if (reason == nullptr) return true;
  count_declined(op.name, reason);
  return false;
}

std::tuple<Tensor, Tensor> serve_forward(const AtenOp& op, AttentionArguments arguments) {
  const ServedCall served;
  const Tensor first = arguments.query;
  const TensorView query(first);
  const auto run = query.on_cuda() ? &attention_forward_cuda : &attention_forward_cpu;
  auto results = run(std::move(arguments), true);
  op.count_served(query);
  return results;
}

ThreeTensors serve_backward(const AtenOp& op, AttentionArguments arguments, const Tensor& grad_out,
                            const Tensor& out, const Tensor& logsumexp) {
  const ServedCall served;
  const Tensor first = arguments.query;
  const TensorView query(first);
  const auto run = query.on_cuda() ? &attention_backward_cuda : &attention_backward_cpu;
  auto results = run(std::move(arguments), grad_out, out, logsumexp);
  op.count_served(query);
  return results;
}

Tensor with_strides(const Tensor& result, const int64_t* strides) {
  const TensorView view(result);
  bool same = true;
  for (int64_t i = 0; i < view.dim; ++i) {
    same = same && (view.sizes[i] == 1 || view.strides[i] == strides[i]);
  }
  if (same && std::equal(strides, strides + view.dim, view.strides)) return result;
  Tensor out = empty_near(view, view.sizes, view.dim, view.dtype, strides);
  return torch::stable::copy_(out, result);
}

Tensor laid_out_as(const Tensor& result, const Tensor& like) {
  const TensorView own(result), other(like);
  if (std::equal(own.strides, own.strides + own.dim, other.strides)) return result;
  const Tensor wanted = torch::stable::empty_like(like);
  return with_strides(result, TensorView(wanted).strides);
}

void mark_empty_rows(Tensor& logsumexp) {
  const double inf = std::numeric_limits<double>::infinity();
  StableIValue stack[] = {
      torch::stable::detail::from(logsumexp),
      torch::stable::detail::from(std::optional<double>(std::numeric_limits<double>::quiet_NaN())),
      torch::stable::detail::from(std::optional<double>(inf)),
      torch::stable::detail::from(std::optional<double>(inf))};
  check_aten(torch_call_dispatcher("aten::nan_to_num_", "", stack, TORCH_ABI_VERSION),
             "aten::nan_to_num_");
  torch::stable::detail::to<Tensor>(stack[0]);  // released
}

Tensor scalar(const TensorView& like, ScalarType dtype) {
  return empty_near(like, nullptr, 0, dtype);
}

Tensor vector(const TensorView& like, int64_t size, ScalarType dtype) {
  return empty_near(like, &size, 1, dtype);
}

namespace {

// PyTorch pads the row dim of the efficient kernel's logsumexp to a multiple of this.
constexpr int64_t kRowsOfSums = 32;

// Query, key and value of one call.
struct Inputs {
  Inputs(const Tensor& query, const Tensor& key, const Tensor& value)
      : q(query), k(key), v(value) {}
  TensorView q, k, v;

  int64_t rows() const { return q.sizes[2]; }
  int64_t columns() const { return k.sizes[2]; }
};

// Why a call with these inputs is not served; null if it may be. Calls without a batch or heads are
// served: cuDNN's kernel returns no tensor then.
const char* why_not_inputs(Policy policy, const Inputs& in, double dropout_p) {
  if (dropout_p > 0) return kDropoutReason;
  if (in.q.dim != 4 || in.k.dim != 4 || in.v.dim != 4) return "a rank that is not 4";
  if (in.k.dtype != in.q.dtype || in.v.dtype != in.q.dtype) return "different dtypes";
  if (const char* reason = why_not_tensor(in.q, CallKind::kAttention, policy)) return reason;
  if (policy == Policy::kFastest && std::max(in.q.sizes[3], in.v.sizes[3]) > kFlashHeadDim) {
    return "a head_dim above 256, which has not been measured";
  }
  const bool heads = in.k.sizes[1] == in.v.sizes[1] && heads_divide(in.q.sizes[1], in.k.sizes[1]);
  const bool fits = heads && in.q.sizes[0] == in.k.sizes[0] && in.k.sizes[0] == in.v.sizes[0] &&
                    in.q.sizes[3] == in.k.sizes[3] && in.k.sizes[2] == in.v.sizes[2];
  if (!fits) return "shapes that it does not take";
  return in.rows() == 0 || in.columns() == 0 ? "no rows or no keys" : nullptr;
}

const char* why_not_bias(const Inputs& in, const TensorView& bias) {
  const bool typed = bias.dtype == in.q.dtype || bias.dtype == ScalarType::Bool;
  return typed && bias.dim <= 4 ? nullptr : "a mask of another dtype";
}

// Below this number of queries, cuDNN was quicker with a mask (on an H200, a query of 192 to 8,192
// keys had 0.83 to 0.94 of its speed, 64 queries of 256 keys 0.7); from 128 queries on, ours was,
// with 77 to 2,048 keys.
constexpr int64_t kFewMaskedQueries = 128;

const char* why_not_cudnn_bias(Policy policy, const Inputs& in, const TensorView& bias,
                               bool is_causal) {
  if (is_causal) return "a mask and is_causal";
  if (const char* reason = why_not_bias(in, bias)) return reason;
  return policy == Policy::kFastest && in.rows() < kFewMaskedQueries
             ? "a mask for fewer than 128 queries, which is not known to be quicker"
             : nullptr;
}

// The causal mask of cuDNN and of the efficient kernel is aligned top left.
const char* why_not_cudnn(Policy policy, const Inputs& in, double dropout_p, bool is_causal) {
  if (const char* reason = why_not_inputs(policy, in, dropout_p)) return reason;
  if (!is_16_bit(in.q.dtype)) return "a dtype that is not float16 or bfloat16";
  if (in.q.sizes[3] != in.v.sizes[3]) return "another head_dim for values";
  if (in.q.sizes[3] > kFlashHeadDim) return "a head_dim above 256";
  return is_causal && in.rows() != in.columns() ? "is_causal with other keys than queries"
                                                : nullptr;
}

// [batch, heads, rows, head_dim] with the heads inside the rows in memory, as the efficient kernel
// lays out its results.
Tensor rows_before_heads(const Tensor& result) {
  const TensorView view(result);
  const int64_t heads = view.sizes[1], rows = view.sizes[2], columns = view.sizes[3];
  const int64_t strides[] = {rows * heads * columns, columns, heads * columns, 1};
  return with_strides(result, strides);
}

AttentionArguments arguments_of(const char* op, const Tensor& query, const Tensor& key,
                                const Tensor& value, const OptionalTensor& bias, bool is_causal,
                                std::optional<double> scale) {
  AttentionArguments arguments = {op, query, key, value, {}};
  arguments.options.attn_mask = bias;
  arguments.options.is_causal = is_causal;
  arguments.options.scale = scale;
  arguments.options.enable_gqa = true;
  return arguments;
}

// Converts a logsumexp from PyTorch's layout to ours: [batch, heads, rows], contiguous.
Tensor sums_of_rows(const Tensor& logsumexp, const Inputs& in) {
  const TensorView view(logsumexp);
  Tensor sums = logsumexp;
  if (view.dim == 4) return torch::stable::squeeze(sums, -1);
  if (view.sizes[2] == in.rows()) return sums;
  return torch::stable::contiguous(torch::stable::narrow(sums, 2, 0, in.rows()));
}

const char* why_not_sums(const Tensor& logsumexp, const Inputs& in, int64_t dim, int64_t rows) {
  constexpr const char* kOther = "a logsumexp of another layout";
  if (!is_defined(logsumexp)) return kOther;
  const TensorView view(logsumexp);
  const bool fits = view.dim == dim && view.dtype == ScalarType::Float &&
                    view.sizes[0] == in.q.sizes[0] && view.sizes[1] == in.q.sizes[1] &&
                    view.sizes[2] == rows && (dim == 3 || view.sizes[3] == 1);
  return fits ? nullptr : kOther;
}

using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

int64_t padded(int64_t rows) { return (rows + kRowsOfSums - 1) / kRowsOfSums * kRowsOfSums; }

FourTensors aten_efficient_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                     const std::optional<Tensor>& bias, bool compute_logsumexp,
                                     double dropout_p, bool is_causal,
                                     std::optional<double> scale) {
  static const AtenOp op("aten::_scaled_dot_product_efficient_attention", CallKind::kAttention);
  const Policy policy = serving_policy();
  if (policy != Policy::kOff) {
    const Inputs in(query, key, value);
    const char* reason = why_not_inputs(policy, in, dropout_p);
    if (reason == nullptr && bias) {
      reason = is_causal ? "a mask and is_causal" : why_not_bias(in, TensorView(*bias));
    }
    if (reason == nullptr && in.q.dtype == ScalarType::Double) reason = "dtype float64";
    if (serves_attention(op, reason)) {
      auto [out, sums] = serve_forward(
          op, arguments_of("attention_forward", query, key, value, bias, is_causal, scale));
      if (compute_logsumexp && bias) mark_empty_rows(sums);  // else every row sees a key
      const int64_t rows = compute_logsumexp ? padded(in.rows()) : 0;
      if (rows != in.rows()) {
        const int64_t sizes[] = {in.q.sizes[0], in.q.sizes[1], rows};
        Tensor wide = empty_near(in.q, sizes, 3, ScalarType::Float);
        if (rows > 0) {
          torch::stable::fill_(wide, std::numeric_limits<double>::infinity());
          Tensor part = torch::stable::narrow(wide, 2, 0, in.rows());
          torch::stable::copy_(part, sums);
        }
        sums = wide;
      }
      return {rows_before_heads(out), sums, scalar(in.q, ScalarType::Long),
              scalar(in.q, ScalarType::Long)};
    }
  }
  return tensors_of_pytorch<4>(op, aten_attentions().efficient, query, key, value, bias,
                               compute_logsumexp, dropout_p, is_causal, scale);
}

FourTensors aten_efficient_attention_backward(const Tensor& grad_out, const Tensor& query,
                                              const Tensor& key, const Tensor& value,
                                              const Tensor& bias, const Tensor& out,
                                              const Tensor& logsumexp, const Tensor& seed,
                                              const Tensor& offset, double dropout_p,
                                              const std::vector<bool>& wanted, bool is_causal,
                                              std::optional<double> scale) {
  static const AtenOp op("aten::_scaled_dot_product_efficient_attention_backward",
                         CallKind::kAttention);
  const Policy policy = serving_policy();
  if (policy != Policy::kOff && is_defined(grad_out)) {
    const Inputs in(query, key, value);
    const char* reason = why_not_inputs(policy, in, dropout_p);
    if (reason == nullptr && wanted.size() > 3 && wanted[3])
      reason = "a mask that needs a gradient";
    if (reason == nullptr && is_defined(bias)) {
      reason = is_causal ? "a mask and is_causal" : why_not_bias(in, TensorView(bias));
    }
    if (reason == nullptr) reason = why_not_sums(logsumexp, in, 3, padded(in.rows()));
    if (serves_attention(op, reason)) {
      const OptionalTensor mask = is_defined(bias) ? OptionalTensor(bias) : std::nullopt;
      const auto [dq, dk, dv] = serve_backward(
          op, arguments_of("attention_backward", query, key, value, mask, is_causal, scale),
          grad_out, out, sums_of_rows(logsumexp, in));
      return {rows_before_heads(dq), rows_before_heads(dk), rows_before_heads(dv),
              undefined_tensor()};
    }
  }
  int32_t flags[4] = {};
  for (size_t i = 0; i < 4 && i < wanted.size(); ++i) flags[i] = wanted[i];
  return tensors_of_pytorch<4>(op, aten_attentions().efficient_backward, grad_out, query, key,
                               value, bias, out, logsumexp, seed, offset, dropout_p, &flags[0], 4,
                               is_causal, scale);
}

AtenAttentionResults aten_cudnn_attention(const Tensor& query, const Tensor& key,
                                          const Tensor& value, const std::optional<Tensor>& bias,
                                          bool compute_logsumexp, double dropout_p, bool is_causal,
                                          bool return_debug_mask, std::optional<double> scale) {
  static const AtenOp op("aten::_scaled_dot_product_cudnn_attention", CallKind::kAttention);
  const Policy policy = serving_policy();
  if (policy != Policy::kOff) {
    const Inputs in(query, key, value);
    const char* reason =
        return_debug_mask ? "return_debug_mask" : why_not_cudnn(policy, in, dropout_p, is_causal);
    if (reason == nullptr && bias) {
      reason = why_not_cudnn_bias(policy, in, TensorView(*bias), is_causal);
    }
    if (serves_attention(op, reason)) {
      auto [out, sums] = serve_forward(
          op, arguments_of("attention_forward", query, key, value, bias, is_causal, scale));
      if (compute_logsumexp && bias) mark_empty_rows(sums);  // else every row sees a key
      return {laid_out_as(out, query),
              compute_logsumexp ? torch::stable::unsqueeze(sums, -1) : undefined_tensor(),
              undefined_tensor(),
              undefined_tensor(),
              in.rows(),
              in.columns(),
              scalar(in.q, ScalarType::Long),
              scalar(in.q, ScalarType::Long),
              undefined_tensor()};
    }
  }
  return results_of_pytorch(op, aten_attentions().cudnn, query, key, value, bias, compute_logsumexp,
                            dropout_p, is_causal, return_debug_mask, scale);
}

ThreeTensors aten_cudnn_attention_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& logsumexp, const Tensor& seed, const Tensor& offset,
    const Tensor& bias, const Tensor& cum_seq_q, const Tensor& cum_seq_k, int64_t max_q,
    int64_t max_k, double dropout_p, bool is_causal, std::optional<double> scale) {
  static const AtenOp op("aten::_scaled_dot_product_cudnn_attention_backward",
                         CallKind::kAttention);
  const Policy policy = serving_policy();
  if (policy != Policy::kOff && is_defined(grad_out)) {
    const Inputs in(query, key, value);
    const char* reason = why_not_cudnn(policy, in, dropout_p, is_causal);
    if (reason == nullptr && is_defined(cum_seq_q)) reason = "packed sequences";
    if (reason == nullptr && is_defined(bias)) {
      reason = why_not_cudnn_bias(policy, in, TensorView(bias), is_causal);
    }
    if (reason == nullptr) reason = why_not_sums(logsumexp, in, 4, in.rows());
    if (serves_attention(op, reason)) {
      const OptionalTensor mask = is_defined(bias) ? OptionalTensor(bias) : std::nullopt;
      const auto [dq, dk, dv] = serve_backward(
          op, arguments_of("attention_backward", query, key, value, mask, is_causal, scale),
          grad_out, out, sums_of_rows(logsumexp, in));
      return {laid_out_as(dq, query), laid_out_as(dk, key), laid_out_as(dv, value)};
    }
  }
  return tensors_of_pytorch<3>(op, aten_attentions().cudnn_backward, grad_out, query, key, value,
                               out, logsumexp, seed, offset, bias, cum_seq_q, cum_seq_k, max_q,
                               max_k, dropout_p, is_causal, scale);
}

}  // namespace

void register_aten_attention(StableLibrary& library, bool on_cuda) {
  const AtenAttentions& aten = aten_attentions();
#define TC_ATTENTION_OP(name)                                        \
  if (!on_cuda || (aten.name && aten.name##_backward)) {             \
    library.impl("_scaled_dot_product_" #name "_attention",          \
                 TC_OVER_ATEN(aten_##name##_attention));             \
    library.impl("_scaled_dot_product_" #name "_attention_backward", \
                 TC_OVER_ATEN(aten_##name##_attention_backward));    \
  }
  TC_ATTENTION_OP(efficient);
  TC_ATTENTION_OP(cudnn);
}

}  // namespace torch_cubin
