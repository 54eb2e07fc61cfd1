// moe on the CPU: the experts' rows through the reference of grouped_matmul.
#include <cmath>
#include <vector>

#include "ops/common/aten.h"
#include "ops/common/batch_invariant.h"
#include "ops/common/stable_ops.h"
#include "ops/experts/experts.h"
#include "ops/experts/float8.h"
#include "ops/grouped/grouped.h"
#include "ops/matmul/checks.h"
#include "ops/matmul/elementwise.h"
#include "ops/matmul/matmul.h"

namespace torch_cubin {
namespace {

Tensor contiguous_as(const Tensor& tensor, ScalarType dtype) {
  return torch::stable::contiguous(narrow_to(detach(tensor), dtype));
}

Tensor part(const Tensor& tensor, int64_t dim, int64_t start, int64_t size) {
  Tensor own = tensor;
  return torch::stable::narrow(own, dim, start, size);
}

// The columns of gates and of ups of contiguous rows of both, as views.
struct GatesAndUps {
  GatesAndUps(const Tensor& rows, int64_t inner, bool interleaved) {
    const int64_t count = TensorView(rows).sizes[0];
    const int64_t dim = interleaved ? 2 : 1;
    const Tensor both =
        torch::stable::view(rows, interleaved ? std::vector<int64_t>{count, inner, 2}
                                              : std::vector<int64_t>{count, 2, inner});
    gate = torch::stable::select(both, dim, 0);
    up = torch::stable::select(both, dim, 1);
  }

  Tensor gate, up;
};

Tensor gated(const Tensor& rows, int64_t inner, Gating gating) {
  const GatesAndUps own(rows, inner, gating.interleaved);
  return multiplied(apply_activation(torch::stable::contiguous(own.gate), gating.activation),
                    torch::stable::contiguous(own.up));
}

// Sums over slots, of rows without weights.
Tensor summed(const Tensor& rows, const HostOrder& order, int64_t tokens, int64_t k) {
  const Tensor places = torch::stable::view(order.places, {tokens, k});
  return expert_sum_cpu(rows, order.tokens, order.tokens, places, std::nullopt);
}

// Each row's weight, (rows, 1) of the dtype; 0 of rows of no expert.
Tensor weights_of_rows(const Tensor& topk_weights, const HostOrder& order, ScalarType dtype) {
  const Tensor weights = contiguous_as(topk_weights, ScalarType::Double);
  const TensorView view(weights);
  const int64_t sizes[] = {view.sizes[0] * view.sizes[1], 1};
  Tensor out = empty_near(view, sizes, 2, ScalarType::Double);
  torch::stable::zero_(out);
  const auto* weight = static_cast<const double*>(view.find_data());
  const auto* place = static_cast<const int32_t*>(TensorView(order.places).find_data());
  auto* to = static_cast<double*>(out.mutable_data_ptr());
  for (int64_t slot = 0; slot < sizes[0]; ++slot) {
    if (place[slot] >= 0) to[place[slot]] = weight[slot];
  }
  return narrow_to(out, dtype);
}

// Each expert's outputs.t() @ inputs of its rows, in the layout of its weights.
Tensor host_weight_gradient(const HostOrder& order, const Tensor& outputs, const Tensor& inputs,
                            const TensorView& weight) {
  const bool transposed = is_stored_transposed(weight);
  const Tensor &left = transposed ? inputs : outputs, &right = transposed ? outputs : inputs;
  const Tensor out = narrow_to(
      grouped_product_cpu(matrices_transposed(left), right, order.ends, false), weight.dtype);
  return transposed ? matrices_transposed(out) : out;
}

// Zeros in rows of no expert, which products of 8-bit floats do not write.
void clear_rest(const Tensor& rows, const HostOrder& order) {
  const TensorView ends(order.ends);
  const int64_t count = TensorView(rows).sizes[0];
  const int64_t last = static_cast<const int32_t*>(ends.find_data())[ends.sizes[0] - 1];
  Tensor rest = part(rows, 0, last, count - last);
  torch::stable::zero_(rest);
}

// The second product's rows; `before`, where given, gets the first one's.
Tensor results_on_host(const Tensor& x, const Tensor& w13, const Tensor& w2, Gating gating,
                       const HostOrder& order, Tensor* before) {
  const TensorView view(x);
  Tensor sums = grouped_product_cpu(selected(wide(x), order.tokens), matrices_transposed(wide(w13)),
                                    order.ends, true);
  // Where moe on CUDA rounds them.
  if (before != nullptr || batch_invariant()) {
    const Tensor rounded = narrow_to(sums, view.dtype);
    sums = wide(rounded);
    if (before != nullptr) *before = rounded;
  }
  const Tensor inside = narrow_to(gated(sums, TensorView(w2).sizes[2], gating), view.dtype);
  return grouped_product_cpu(inside, matrices_transposed(detach(w2)), order.ends, true);
}

Tensor moe_on_host(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
                   const Tensor& w13, const Tensor& w2, Gating gating, const std::string& recipe,
                   const MoeCopies& copies, MoeKept* kept) {
  const TensorView view(x), ids(topk_ids), first(w13), second(w2);
  check_moe(view, ids, TensorView(topk_weights), first, second);
  const bool of_float8 = is_of_float8(recipe, gating, view, copies.has_value());
  const Float8Given given(copies, false, first, second);
  const int64_t experts = second.sizes[0], rows = ids.sizes[0] * ids.sizes[1];
  const Tensor memory = order_on_host(topk_ids, experts);
  const HostOrder order(memory, rows, experts);
  Tensor before, results;
  if (of_float8) {
    results = float8_results(kFloat8OnHost, quantize_rows_cpu(x, order.tokens), w13, w2, given,
                             order.ends, kept == nullptr ? nullptr : &before);
    if (kept != nullptr) clear_rest(before, order);
  } else {
    results = results_on_host(x, w13, w2, gating, order, kept == nullptr ? nullptr : &before);
  }
  if (kept != nullptr) *kept = {before, memory};
  const Tensor places = torch::stable::view(order.places, {ids.sizes[0], ids.sizes[1]});
  return expert_sum_cpu(results, order.tokens, order.tokens, places, topk_weights);
}

}  // namespace

Tensor order_on_host(const Tensor& topk_ids, int64_t experts) {
  const Tensor all = contiguous_as(topk_ids, ScalarType::Long);
  const TensorView ids(all);
  const int64_t rows = ids.sizes[0] * ids.sizes[1], size = expert_order_size(rows, experts);
  const auto* id = static_cast<const int64_t*>(ids.find_data());
  std::vector<std::vector<int32_t>> slots(static_cast<size_t>(experts) + 1);
  for (int64_t i = 0; i < rows; ++i) {
    const bool exists = id[i] >= 0 && id[i] < experts;
    slots[static_cast<size_t>(exists ? id[i] : experts)].push_back(static_cast<int32_t>(i));
  }
  const Tensor memory = empty_near(ids, &size, 1, ScalarType::Int);
  const ExpertOrder order(memory, rows);
  int32_t place = 0;
  for (size_t expert = 0; expert < slots.size(); ++expert) {
    const bool exists = expert < static_cast<size_t>(experts);
    for (const int32_t slot : slots[expert]) {
      order.tokens[place] = slot / static_cast<int32_t>(ids.sizes[1]);
      order.places[slot] = exists ? place : -1;
      ++place;
    }
    if (exists) order.ends[expert] = place;
  }
  return memory;
}

HostOrder::HostOrder(const Tensor& memory, int64_t rows, int64_t experts)
    : tokens(part(memory, 0, 0, rows)),
      places(part(memory, 0, rows, rows)),
      ends(part(memory, 0, 2 * rows, experts)) {}

Tensor moe_cpu(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
               const Tensor& w13, const Tensor& w2, const std::string& activation, bool interleaved,
               const std::string& recipe) {
  const Gating gating{check_activation(activation, kMoeOp), interleaved};
  return moe_on_host(x, topk_ids, topk_weights, w13, w2, gating, recipe, {}, nullptr);
}

std::tuple<Tensor, Tensor, Tensor> moe_forward_cpu(const Tensor& x, const Tensor& topk_ids,
                                                   const Tensor& topk_weights, const Tensor& w13,
                                                   const Tensor& w2, const std::string& activation,
                                                   bool interleaved, const std::string& recipe,
                                                   const MoeCopies& copies) {
  MoeKept kept;
  const Gating gating{check_activation(activation, kMoeOp), interleaved};
  const Tensor out = moe_on_host(x, topk_ids, topk_weights, w13, w2, gating, recipe, copies, &kept);
  return {out, kept.before, kept.order};
}

MoeGradients moe_backward_cpu(const Tensor& grad, const Tensor& x, const Tensor& topk_weights,
                              const Tensor& w13, const Tensor& w2, const Tensor& before,
                              const Tensor& memory, const std::string& activation, bool interleaved,
                              bool of_x, bool of_w13, bool of_w2, const std::string& recipe,
                              const MoeCopies& copies) {
  const TensorView view(x), weights(topk_weights), first(w13), second(w2), sums(before);
  const Activation known = check_activation(activation, kMoeOp);
  check_moe_backward(TensorView(grad), view, weights, first, second, sums, TensorView(memory));
  const bool of_float8 = is_of_float8(recipe, {known, interleaved}, view, copies.has_value());
  const Float8Given given(copies, true, first, second);
  const int64_t tokens = weights.sizes[0], k = weights.sizes[1], inner = second.sizes[2];
  const HostOrder order(as_contiguous(memory), tokens * k, second.sizes[0]);
  const auto times_weight = [&](const Tensor& rows, const Tensor& weight,
                                const std::optional<Float8Weight>& copy) {
    if (!of_float8) return grouped_product_cpu(rows, wide(weight), order.ends, true);
    const Tensor own = narrow_to(rows, view.dtype);
    const Quantized quantised_rows = quantize_rows_cpu(own, std::nullopt);
    const Tensor out =
        float8_input_gradient(kFloat8OnHost, quantised_rows, weight, copy, order.ends);
    clear_rest(out, order);
    return wide(out);
  };
  const auto of_weight = [&](const Tensor& outputs, const Tensor& inputs,
                             const TensorView& weight) {
    if (!of_float8) return host_weight_gradient(order, outputs, inputs, weight);
    const GroupBlocks blocks = find_group_blocks_cpu(order.ends, tokens * k);
    const auto columns = [&](const Tensor& rows) {
      return quantize_groups_cpu(narrow_to(rows, view.dtype), std::nullopt, blocks);
    };
    return float8_weight_gradient(kFloat8OnHost, columns(outputs), columns(inputs), weight, blocks);
  };
  const Tensor grad_rows = selected(wide(grad), order.tokens);
  const Tensor inside_grad = times_weight(grad_rows, w2, given.w2);
  const GatesAndUps own(as_contiguous(wide(before)), inner, interleaved);
  const Tensor gate = torch::stable::contiguous(own.gate), up = torch::stable::contiguous(own.up);
  const Tensor value = apply_activation(gate, known), inside = multiplied(value, up);
  const ScalarType dtype = TensorView(inside).dtype;
  const int64_t column[] = {inner, 1}, none = 0;
  Tensor ones = empty_near(view, column, 2, dtype);
  torch::stable::fill_(ones, 1);
  const Tensor dots = matmul_cpu(multiplied(inside_grad, inside), ones);
  const Tensor slots = torch::stable::view(order.places, {tokens * k, 1});
  const Tensor weights_grad = expert_sum_cpu(dots, order.tokens, order.tokens, slots, std::nullopt);
  const Tensor by = weights_of_rows(topk_weights, order, dtype);
  const Tensor weighted = multiplied(inside_grad, by);
  Tensor before_grad = empty_near(view, sums.sizes, 2, dtype);
  GatesAndUps grads(before_grad, inner, interleaved);
  torch::stable::copy_(grads.gate,
                       apply_activation_backward(multiplied(weighted, up), gate, known));
  torch::stable::copy_(grads.up, multiplied(weighted, value));
  const auto nothing = [&] { return empty_near(view, &none, 1, view.dtype); };
  MoeGradients out{nothing(),
                   torch::stable::view(narrow_to(weights_grad, weights.dtype), {tokens, k}),
                   nothing(), nothing()};
  auto& [x_grad, unused, w13_grad, w2_grad] = out;
  if (of_x) {
    const Tensor rows = times_weight(before_grad, w13, given.w13);
    x_grad = narrow_to(summed(rows, order, tokens, k), view.dtype);
  }
  if (of_w13) w13_grad = of_weight(before_grad, selected(wide(x), order.tokens), first);
  if (of_w2) w2_grad = of_weight(grad_rows, multiplied(inside, by), second);
  return out;
}

}  // namespace torch_cubin
