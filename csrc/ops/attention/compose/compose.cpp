#include "ops/attention/compose/compose.h"

#include <algorithm>
#include <vector>

#include "cubin/error.h"
#include "ops/attention/problem/operands.h"
#include "ops/common/shape.h"
#include "ops/common/stable_ops.h"
#include "ops/matmul/matmul.h"

namespace torch_cubin {
namespace {

using torch::stable::copy_;
using torch::stable::reshape;
using torch::stable::transpose;
using torch::stable::unsqueeze;
using torch::stable::view;

// The scores of one part of a call: enough to fill any device, little enough to fit beside a model.
constexpr int64_t kPartBytes = int64_t{512} << 20;

Tensor multiply(const Tensor& a, const Tensor& b) {
  return TensorView(a).on_cuda() ? matmul_cuda(a, b) : matmul_cpu(a, b);
}

Tensor mT(const Tensor& tensor) { return transpose(tensor, -2, -1); }

Tensor as(const Tensor& tensor, ScalarType dtype) {
  return TensorView(tensor).dtype == dtype ? tensor : torch::stable::to(tensor, dtype);
}

Tensor part_of(const Tensor& tensor, int64_t dim, int64_t first, int64_t count) {
  if (first == 0 && TensorView(tensor).sizes[dim] == count) return tensor;
  Tensor whole = tensor;  // torch's narrow takes a reference
  return torch::stable::narrow(whole, dim, first, count);
}

// The block of a tensor with dims [batch, heads]; a dim of size 1 broadcasts.
Tensor block_of(const Tensor& tensor, int64_t batch, int64_t batches, int64_t head, int64_t heads) {
  const TensorView sizes(tensor);
  Tensor out = sizes.sizes[0] == 1 ? tensor : part_of(tensor, 0, batch, batches);
  return sizes.sizes[1] == 1 ? out : part_of(out, 1, head, heads);
}

Tensor empty_on(const TensorView& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
  return empty_near(like, sizes.data(), static_cast<int64_t>(sizes.size()), dtype);
}

// The sizes, and the parts in which the call is computed: whole batches, or some kv heads of one.
struct Parts {
  int64_t batch, heads, kv_heads, group, rows, columns;
  int64_t batches_a_part, kv_heads_a_part;

  Parts(const TensorView& query, const TensorView& key)
      : batch(query.sizes[0]),
        heads(query.sizes[1]),
        kv_heads(key.sizes[1]),
        group(kv_heads > 0 ? heads / kv_heads : 1),
        rows(query.sizes[2]),
        columns(key.sizes[2]) {
    const double head_bytes = static_cast<double>(element_size(sums_dtype(query.dtype))) *
                              static_cast<double>(group) * static_cast<double>(rows) *
                              static_cast<double>(columns);
    const double fitting = kPartBytes / std::max(head_bytes, 1.0);
    const double all = static_cast<double>(kv_heads);
    kv_heads_a_part = static_cast<int64_t>(std::max(1.0, std::min(fitting, all)));
    batches_a_part = 1;
    if (kv_heads_a_part == kv_heads) {
      const double batches = fitting / std::max(all, 1.0);
      batches_a_part =
          static_cast<int64_t>(std::max(1.0, std::min(batches, static_cast<double>(batch))));
    }
  }

  bool single() const { return batches_a_part >= batch && kv_heads_a_part >= kv_heads; }

  // body(first batch, batches, first kv head, kv heads), at least once.
  template <class Body>
  void each(Body&& body) const {
    if (single()) return body(int64_t{0}, batch, int64_t{0}, kv_heads);
    for (int64_t b = 0; b < batch; b += batches_a_part) {
      for (int64_t h = 0; h < kv_heads; h += kv_heads_a_part) {
        body(b, std::min(batches_a_part, batch - b), h, std::min(kv_heads_a_part, kv_heads - h));
      }
    }
  }
};

// [batch, kv heads, group, rows, columns], a view.
Tensor grouped(const Tensor& tensor, int64_t kv_heads, int64_t group) {
  const TensorView t(tensor);
  const std::vector<int64_t> sizes = {t.sizes[0], kv_heads, group, t.sizes[2], t.sizes[3]};
  return view(tensor, sizes);
}

// [batch, kv heads, group * rows, columns]; a copy if the strides do not allow a view.
Tensor stacked(const Tensor& tensor, int64_t kv_heads, int64_t group) {
  const TensorView t(tensor);
  const std::vector<int64_t> sizes = {t.sizes[0], kv_heads, group * t.sizes[2], t.sizes[3]};
  return reshape(tensor, sizes);
}

// (..., rows, a) @ (..., a, columns) of each head of query with its kv head's matrix, as [batch,
// heads, rows, columns].
Tensor multiply_heads(const Tensor& query, const Tensor& matrix, int64_t kv_heads, int64_t group) {
  if (group == 1) return multiply(query, matrix);
  const Tensor out = multiply(grouped(query, kv_heads, group), unsqueeze(matrix, 2));
  const TensorView t(out);
  const std::vector<int64_t> sizes = {t.sizes[0], kv_heads * group, t.sizes[3], t.sizes[4]};
  return view(out, sizes);
}

}  // namespace

AttentionOptions options_of_part(const AttentionOptions& all, int64_t batch, int64_t batches,
                                 int64_t head, int64_t heads) {
  AttentionOptions part = all;
  if (all.attn_mask) {
    Tensor mask = *all.attn_mask;
    while (TensorView(mask).dim < 4) mask = unsqueeze(mask, 0);
    part.attn_mask = block_of(mask, batch, batches, head, heads);
  }
  const auto narrow = [&](OptionalTensor& per_head) {
    if (!per_head) return;
    const bool batched = TensorView(*per_head).dim == 2;
    if (batched) per_head = part_of(*per_head, 0, batch, batches);
    per_head = part_of(*per_head, batched ? 1 : 0, head, heads);
  };
#define TC_NARROW(name, batched) narrow(part.name);
  TC_PER_HEAD_OPTIONS(TC_NARROW)
#undef TC_NARROW
  return part;
}

std::tuple<Tensor, Tensor> compose_forward(const ComposeInputs& inputs,
                                           const AttentionSettings& settings, bool want_logsumexp) {
  const TensorView q_view(inputs.query), v_view(inputs.value);
  const Parts parts(q_view, TensorView(inputs.key));
  const ScalarType dtype = sums_dtype(q_view.dtype);
  const Tensor q = as(inputs.query, dtype), k = as(inputs.key, dtype), v = as(inputs.value, dtype);
  Tensor logsumexp =
      empty_on(q_view,
               want_logsumexp ? std::vector<int64_t>{parts.batch, parts.heads, parts.rows}
                              : std::vector<int64_t>{0},
               dtype);
  std::optional<Tensor> out;
  if (!parts.single()) {
    out = empty_on(q_view, {parts.batch, parts.heads, parts.rows, v_view.sizes[3]}, v_view.dtype);
  }
  parts.each([&](int64_t b, int64_t batches, int64_t kv_head, int64_t kv_heads) {
    const int64_t head = kv_head * parts.group, heads = kv_heads * parts.group;
    const auto of = [&](const Tensor& t) { return block_of(t, b, batches, head, heads); };
    const auto kv_of = [&](const Tensor& t) { return block_of(t, b, batches, kv_head, kv_heads); };
    Tensor scores = multiply_heads(of(q), mT(kv_of(k)), kv_heads, parts.group);
    std::optional<Tensor> sums;
    if (want_logsumexp) sums = of(logsumexp);
    softmax_forward(settings, options_of_part(inputs.options, b, batches, head, heads),
                    {b * parts.heads + head, parts.heads}, scores, sums ? &*sums : nullptr);
    const Tensor part = multiply_heads(scores, kv_of(v), kv_heads, parts.group);
    if (!out) {
      out = as(part, v_view.dtype);
    } else {
      Tensor place = of(*out);
      copy_(place, part);
    }
  });
  return {std::move(*out), std::move(logsumexp)};
}

std::tuple<Tensor, Tensor, Tensor> compose_backward(const ComposeInputs& inputs,
                                                    const AttentionSettings& settings,
                                                    const Tensor& grad_out, const Tensor& out,
                                                    const Tensor& logsumexp) {
  const TensorView q_view(inputs.query), k_view(inputs.key), v_view(inputs.value);
  const Parts parts(q_view, k_view);
  const ScalarType dtype = sums_dtype(q_view.dtype);
  const Tensor q = as(inputs.query, dtype), k = as(inputs.key, dtype), v = as(inputs.value, dtype);
  const Tensor grad = as(grad_out, dtype), result = as(out, dtype);
  const Tensor sums = torch::stable::contiguous(logsumexp);
  std::optional<Tensor> dq, dk, dv;
  if (!parts.single()) {
    const auto empty = [&](const TensorView& like) {
      const std::vector<int64_t> sizes(like.sizes, like.sizes + 4);
      return empty_on(like, sizes, like.dtype);
    };
    dq = empty(q_view);
    dk = empty(k_view);
    dv = empty(v_view);
  }
  const auto put = [](std::optional<Tensor>& whole, Tensor place, const Tensor& part) {
    if (whole) copy_(place, part);
  };
  parts.each([&](int64_t b, int64_t batches, int64_t kv_head, int64_t kv_heads) {
    const int64_t group = parts.group, head = kv_head * group, heads = kv_heads * group;
    const auto of = [&](const Tensor& t) { return block_of(t, b, batches, head, heads); };
    const auto kv_of = [&](const Tensor& t) { return block_of(t, b, batches, kv_head, kv_heads); };
    const Tensor q_part = of(q), k_part = kv_of(k), grad_part = of(grad);
    // Dot products of the rows: [batch, heads, rows, 1, 1].
    const Tensor delta = multiply(unsqueeze(grad_part, -2), unsqueeze(of(result), -1));
    const Tensor weights = multiply_heads(q_part, mT(k_part), kv_heads, group);
    const Tensor grads = multiply_heads(grad_part, mT(kv_of(v)), kv_heads, group);
    softmax_backward(settings, options_of_part(inputs.options, b, batches, head, heads),
                     {b * parts.heads + head, parts.heads}, weights, grads, of(sums), delta);

    const Tensor dq_part = multiply_heads(grads, k_part, kv_heads, group);
    const Tensor dk_part =
        multiply(mT(stacked(grads, kv_heads, group)), stacked(q_part, kv_heads, group));
    const Tensor dv_part =
        multiply(mT(stacked(weights, kv_heads, group)), stacked(grad_part, kv_heads, group));
    if (parts.single()) {
      dq = as(dq_part, q_view.dtype);
      dk = as(dk_part, k_view.dtype);
      dv = as(dv_part, v_view.dtype);
      return;
    }
    put(dq, of(*dq), dq_part);
    put(dk, kv_of(*dk), dk_part);
    put(dv, kv_of(*dv), dv_part);
  });
  return {std::move(*dq), std::move(*dk), std::move(*dv)};
}

ComposeInputs compose_inputs(const AttentionCall& call) {
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
  inputs.query = merged(call.query, shape.heads, shape.seqlen_q, shape.head_dim);
  inputs.key =
      merged(repeat_heads(call.key, shape), shape.kv_heads, shape.seqlen_k, shape.head_dim);
  inputs.value =
      merged(repeat_heads(call.value, shape), shape.kv_heads, shape.seqlen_k, shape.head_dim_v);
  inputs.options = call.options;
  AttentionOptions& options = inputs.options;
  if (options.attn_mask) {
    options.attn_mask =
        torch::stable::reshape(expand_mask(*options.attn_mask, shape),
                               {batch, shape.heads, shape.seqlen_q, shape.seqlen_k});
  }
  make_heads_contiguous(options);
  return inputs;
}

std::tuple<Tensor, Tensor, Tensor> compose_gradients(const AttentionCall& call,
                                                     const Tensor& grad_out, const Tensor& out,
                                                     const Tensor& logsumexp) {
  const AttentionShape& shape = call.shape;
  const ComposeInputs in = compose_inputs(call);
  const std::vector<int64_t> rows = {TensorView(in.query).sizes[0], shape.heads, shape.seqlen_q};
  std::vector<int64_t> wide = rows;
  wide.push_back(shape.head_dim_v);
  const auto [dq, dk, dv] =
      compose_backward(in, call.settings, torch::stable::reshape(grad_out, wide),
                       torch::stable::reshape(out, wide), torch::stable::reshape(logsumexp, rows));
  return {sum_to_operand(dq, shape, call.q), sum_to_operand(dk, shape, call.k),
          sum_to_operand(dv, shape, call.v)};
}

}  // namespace torch_cubin
