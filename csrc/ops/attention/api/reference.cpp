// Attention on the CPU: the composition (compose.h), whose parts are references on the CPU. For
// float8_e4m3fn the inputs are first multiplied by their factors. For development and tests only.
//
// NOTE: ATen's scaled_dot_product_attention supports neither our options nor our dropout seed, and
// returns no logsumexp.
#include <algorithm>
#include <limits>
#include <vector>

#include "cubin/error.h"
#include "ops/attention/api/attention.h"
#include "ops/attention/compose/compose.h"
#include "ops/attention/problem/operands.h"
#include "ops/common/aten.h"
#include "ops/common/dispatch.h"
#include "ops/common/stable_ops.h"

namespace torch_cubin {
namespace {

void detach_option(OptionalTensor& tensor) {
  if (tensor) tensor = detach(*tensor);
}
template <class T>
void detach_option(T&) {}

AttentionArguments detached(AttentionArguments arguments) {
  for (Tensor* each : {&arguments.query, &arguments.key, &arguments.value}) *each = detach(*each);
#define TC_DETACH(type, name, ...) detach_option(arguments.options.name);
  TC_ATTENTION_OPTIONS(TC_DETACH)
#undef TC_DETACH
  return arguments;
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

Forward forward_dense(const AttentionCall& call) {
  const AttentionShape& shape = call.shape;
  if ((shape.seqlen_k == 0 || shape.kv_heads == 0) && !call.options.sinks) {
    const std::vector<int64_t> out = shape.out.vector();
    const std::vector<int64_t> rows(out.begin(), out.end() - 1);
    Tensor logsumexp = torch::stable::new_empty(call.query, rows, sums_dtype(call.dtype));
    torch::stable::fill_(logsumexp, -std::numeric_limits<double>::infinity());
    return {torch::stable::new_zeros(call.query, out), logsumexp};
  }
  const auto [out, logsumexp] = compose_forward(compose_inputs(call), call.settings, true);
  return {out, logsumexp};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor>;  // of query, key and value

Gradients zeros_like(const AttentionCall& call) {
  const auto zeros = [](const Tensor& like, const TensorView& view) {
    return torch::stable::new_zeros(like, sizes_of(view));
  };
  return {zeros(call.query, call.q), zeros(call.key, call.k), zeros(call.value, call.v)};
}

Gradients backward_dense(const AttentionCall& call, const Tensor& grad_out, const Tensor& out,
                         const Tensor& logsumexp) {
  const AttentionShape& shape = call.shape;
  if (shape.logsumexp.numel() == 0 || shape.seqlen_k == 0 || shape.kv_heads == 0) {
    return zeros_like(call);
  }
  return compose_gradients(call, grad_out, out, logsumexp);
}

// The offset at which each packed sequence begins, and the end of the last.
std::vector<int64_t> offsets(const OptionalTensor& cu_seqlens, const TensorView& packed,
                             const char* name) {
  const Tensor all = torch::stable::contiguous(*cu_seqlens);
  const auto* data = static_cast<const int32_t*>(all.data_ptr());
  const int64_t rows = packed.sizes[0];
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
struct PackedSequence {
  int64_t q_begin, q_rows, k_begin, k_rows;
  AttentionOptions options;

  static Tensor slice(const Tensor& packed, int64_t begin, int64_t rows) {
    Tensor all = packed;
    return torch::stable::unsqueeze(
        torch::stable::transpose(torch::stable::narrow(all, 0, begin, rows), 0, 1), 0);
  }
  Tensor of_query(const Tensor& packed) const { return slice(packed, q_begin, q_rows); }
  Tensor of_key(const Tensor& packed) const { return slice(packed, k_begin, k_rows); }
  AttentionCall of(const AttentionCall& call) const {
    return AttentionCall(
        {call.op, of_query(call.query), of_key(call.key), of_key(call.value), options});
  }

  // Copies (1, heads, rows, columns) back to its position.
  static void put(Tensor& packed, int64_t begin, int64_t rows, const Tensor& one) {
    Tensor all = packed, own = one;
    Tensor place = torch::stable::narrow(all, 0, begin, rows);
    torch::stable::copy_(place, torch::stable::transpose(torch::stable::squeeze(own, 0), 0, 1));
  }
};

std::vector<PackedSequence> sequences(const AttentionCall& call) {
  const auto q = offsets(call.options.cu_seqlens_q, call.q, "cu_seqlens_q");
  const auto k = offsets(call.options.cu_seqlens_k, call.k, "cu_seqlens_k");
  std::vector<PackedSequence> all;
  for (size_t b = 0; b + 1 < q.size(); ++b) {
    PackedSequence one = {
        q[b], q[b + 1] - q[b], k[b], k[b + 1] - k[b],
        options_of_part(call.options, static_cast<int64_t>(b), 1, 0, call.shape.heads)};
    one.options.cu_seqlens_q = one.options.cu_seqlens_k = std::nullopt;
    all.push_back(std::move(one));
  }
  if (call.settings.drop_below > 0 && all.size() > 1) {
    fail({"input", "the CPU reference", "has no dropout for several packed sequences",
          "one sequence, or dropout_p = 0", std::to_string(all.size()) + " sequences", ""});
  }
  return all;
}

Forward forward_packed(const AttentionCall& call) {
  const Shape& sizes = call.shape.out;
  Tensor out = torch::stable::new_zeros(call.query, sizes.vector());
  Tensor logsumexp = torch::stable::new_zeros(call.query, {call.shape.heads, sizes.sizes[0]},
                                              sums_dtype(call.dtype));
  torch::stable::fill_(logsumexp, -std::numeric_limits<double>::infinity());
  for (const PackedSequence& one : sequences(call)) {
    if (one.q_rows == 0) continue;
    const Forward computed = forward_dense(one.of(call));
    PackedSequence::put(out, one.q_begin, one.q_rows, computed.out);
    Tensor place = torch::stable::narrow(logsumexp, 1, one.q_begin, one.q_rows);
    torch::stable::copy_(
        place, torch::stable::reshape(computed.logsumexp, {call.shape.heads, one.q_rows}));
  }
  return {out, logsumexp};
}

Gradients backward_packed(const AttentionCall& call, const Tensor& grad_out, const Tensor& out,
                          const Tensor& logsumexp) {
  auto [dq, dk, dv] = zeros_like(call);
  for (const PackedSequence& one : sequences(call)) {
    if (one.q_rows == 0 || one.k_rows == 0) continue;
    Tensor rows = logsumexp;
    const auto [own_dq, own_dk, own_dv] =
        backward_dense(one.of(call), one.of_query(grad_out), one.of_query(out),
                       torch::stable::narrow(rows, 1, one.q_begin, one.q_rows));
    PackedSequence::put(dq, one.q_begin, one.q_rows, own_dq);
    PackedSequence::put(dk, one.k_begin, one.k_rows, own_dk);
    PackedSequence::put(dv, one.k_begin, one.k_rows, own_dv);
  }
  return {dq, dk, dv};
}

Tensor times(const Tensor& tensor, const Tensor& factors) {
  return call_tensor_op("aten::mul", "Tensor", tensor, factors);
}

// `tensor` in float32 times `descale`, each of whose entries applies to `group` heads.
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
    // The reference refuses invalid offsets later.
    const int64_t begin = std::clamp<int64_t>(offsets[b], 0, rows);
    const int64_t end = std::clamp<int64_t>(offsets[b + 1], begin, rows);
    Tensor place = torch::stable::narrow(wide, 0, begin, end - begin);
    Tensor own = factors;
    own = torch::stable::unsqueeze(torch::stable::narrow(own, 0, b, 1), 2);
    torch::stable::copy_(place, times(place, own));
  }
  return wide;
}

// Query, key and value of float8_e4m3fn in float32, times their factors.
AttentionArguments dequantised(AttentionArguments arguments, const AttentionCall& call) {
  AttentionOptions& options = arguments.options;
  arguments.query =
      dequantised(call.query, options.q_descale, call.shape.group(), options.cu_seqlens_q);
  arguments.key = dequantised(call.key, options.k_descale, 1, options.cu_seqlens_k);
  arguments.value = dequantised(call.value, options.v_descale, 1, options.cu_seqlens_k);
  options.q_descale = options.k_descale = options.v_descale = std::nullopt;
  options.e4m3 = false;
  return arguments;
}

}  // namespace

std::tuple<Tensor, Tensor> attention_forward_cpu(AttentionArguments arguments, bool) {
  arguments = detached(std::move(arguments));
  const AttentionCall call(arguments);
  if (call.options.e4m3) {
    const auto [computed, logsumexp] =
        attention_forward_cpu(dequantised(std::move(arguments), call), true);
    return {laid_out(computed, call.shape.out, call.q, call.out_dtype), logsumexp};
  }
  const Forward computed = call.shape.packed ? forward_packed(call) : forward_dense(call);
  const Shape& rows = call.shape.logsumexp;
  Tensor logsumexp = empty_near(call.q, rows.sizes, rows.dim, sums_dtype(call.dtype));
  torch::stable::copy_(logsumexp, torch::stable::reshape(computed.logsumexp, rows.vector()));
  return {laid_out(computed.out, call.shape.out, call.q, call.dtype), logsumexp};
}

Gradients attention_backward_cpu(AttentionArguments arguments, const Tensor& grad_out,
                                 const Tensor& out, const Tensor& logsumexp) {
  arguments = detached(std::move(arguments));
  const AttentionCall call(arguments);
  const Tensor o = detach(out), g = detach(grad_out), rows = detach(logsumexp);
  check_attention_backward(call.op, call.shape, call.q, TensorView(g), TensorView(o),
                           TensorView(rows));
  if (call.options.e4m3) {
    const auto wide = [](const Tensor& tensor) {
      return torch::stable::to(tensor, ScalarType::Float);
    };
    const auto [dq, dk, dv] =
        attention_backward_cpu(dequantised(std::move(arguments), call), wide(g), wide(o), rows);
    const auto finish = [&](const Tensor& grad, const TensorView& operand) {
      return laid_out(grad, shape_of(operand), operand, call.out_dtype);
    };
    return {finish(dq, call.q), finish(dk, call.k), finish(dv, call.v)};
  }
  const auto [dq, dk, dv] =
      call.shape.packed ? backward_packed(call, g, o, rows) : backward_dense(call, g, o, rows);
  const auto finish = [&](const Tensor& grad, const TensorView& operand) {
    return laid_out(grad, shape_of(operand), operand, operand.dtype);
  };
  return {finish(dq, call.q), finish(dk, call.k), finish(dv, call.v)};
}

}  // namespace torch_cubin
