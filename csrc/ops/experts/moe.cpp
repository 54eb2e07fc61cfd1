// moe on CUDA: the tokens' order, the gated product of gathered rows, the second product, the sum;
// and the layer whose forward keeps what its derivative needs.
#include <utility>

#include "cubin/error.h"
#include "ops/common/aten.h"
#include "ops/common/batch_invariant.h"
#include "ops/common/stable_ops.h"
#include "ops/experts/experts.h"
#include "ops/experts/float8.h"
#include "ops/grouped/grouped.h"
#include "ops/grouped/operands.h"
#include "ops/matmul/checks.h"
#include "ops/matmul/elementwise.h"

namespace torch_cubin {
namespace {

Tensor matrix(int64_t rows, int64_t columns, const TensorView& like) {
  const int64_t sizes[] = {rows, columns};
  return empty_cuda(sizes, 2, like.dtype, like.device_index);
}

// Runs a product of groups whose ends are the order's, into `out`.
void run_product(const Device& device, GroupedOperands& operands, const ExpertOrder& order,
                 const Tensor& out) {
  GroupedCall& call = operands.call;
  call.ends = order.ends;
  call.out = static_cast<char*>(out.mutable_data_ptr());
  run_grouped(device, call);
}

// The same of rows, into a new tensor of `columns`.
Tensor product(const Device& device, GroupedOperands& operands, const ExpertOrder& order,
               int64_t rows, int64_t columns, const TensorView& like) {
  Tensor out = matrix(rows, columns, like);
  operands.call.m = rows;
  operands.call.n = columns;
  run_product(device, operands, order, out);
  return out;
}

// A tensor for the gradient of a weight, contiguous where the weight is.
Tensor weight_memory(const TensorView& weight) {
  int64_t sizes[] = {weight.sizes[0], weight.sizes[1], weight.sizes[2]};
  if (is_stored_transposed(weight)) std::swap(sizes[1], sizes[2]);
  return empty_cuda(sizes, 3, weight.dtype, weight.device_index);
}

Tensor as_weight(const Tensor& memory, const TensorView& weight) {
  return is_stored_transposed(weight) ? matrices_transposed(memory) : memory;
}

// Each expert's outputs.t() @ inputs of its rows.
Tensor weight_gradient(const Device& device, const ExpertOrder& order, const Tensor& outputs,
                       const Tensor& inputs, const TensorView& weight) {
  const bool transposed = is_stored_transposed(weight);
  const Tensor &left = transposed ? inputs : outputs, &right = transposed ? outputs : inputs;
  const Tensor out = weight_memory(weight);
  GroupedOperands operands(kMoeOp, left, right, weight.sizes[0], true);
  run_product(device, operands, order, out);
  return as_weight(out, weight);
}

// The sizes of a call whose arguments fit together; throws for those that no kernel takes.
struct MoeSizes {
  MoeSizes(const TensorView& x, const TensorView& weights, const TensorView& w2) {
    if (x.dtype == ScalarType::Double) {
      fail({"no_kernel", kMoeOp, "has no kernels for this dtype on CUDA",
            "float16, bfloat16 or float32", dtype_name(x.dtype), "Convert the tensors."});
    }
    tokens = x.sizes[0];
    k = weights.sizes[1];
    rows = tokens * k;
    experts = w2.sizes[0];
    hidden = w2.sizes[1];
    inner = w2.sizes[2];
    check_moe_rows(rows);
  }

  // Without products; results are zero.
  bool is_empty() const { return rows == 0 || inner == 0 || hidden == 0; }

  int64_t tokens, k, rows, experts, hidden, inner;
};

// The second product's rows of a layer without 8-bit floats; `before`, where given, gets the first
// one's.
Tensor results_of(const Device& gpu, const MoeSizes& sizes, const ExpertOrder& order,
                  const Tensor& x, const Tensor& w13, const Tensor& w2, Gating gating,
                  Tensor* before) {
  const TensorView view(x);
  const bool has_options = has_row_options(view.dtype);
  // Sums that are kept are rounded before the gate: bits would depend on whether they are.
  const bool gates = has_options && before == nullptr && gating.activation != kActivationNone &&
                     !batch_invariant();
  const Tensor own = has_options ? x : gathered_rows(gpu, x, order.tokens, sizes.rows);
  GroupedOperands up(kMoeOp, own, w13, sizes.experts, true, gates ? gating : Gating{});
  if (has_options) {
    up.call.rows = order.tokens;
    up.call.a_height = sizes.tokens;
  }
  Tensor inside = product(gpu, up, order, sizes.rows, (gates ? 1 : 2) * sizes.inner, view);
  if (!gates) {
    const Tensor sums = inside;
    inside = matrix(sizes.rows, sizes.inner, view);
    gate_experts(gpu, {sums, order.places, sizes.rows, gating, inside, std::nullopt});
    if (before != nullptr) *before = sums;
  }
  GroupedOperands down(kMoeOp, inside, w2, sizes.experts, true);
  return product(gpu, down, order, sizes.rows, sizes.hidden, view);
}

// The layer; `kept`, where given, gets what the derivative needs.
Tensor run_moe(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
               const Tensor& w13, const Tensor& w2, Gating gating, const std::string& recipe,
               const MoeCopies& copies, MoeKept* kept) {
  const TensorView view(x), weights(topk_weights), first(w13), second(w2);
  check_moe(view, TensorView(topk_ids), weights, first, second);
  const bool of_float8 = is_of_float8(recipe, gating, view, copies.has_value());
  const Float8Given given(copies, false, first, second);
  const MoeSizes sizes(view, weights, second);
  Tensor out = matrix(sizes.tokens, sizes.hidden, view);
  if (kept != nullptr && sizes.is_empty()) {
    const int64_t size = expert_order_size(sizes.rows, sizes.experts);
    kept->before = matrix(sizes.rows, 2 * sizes.inner, view);
    kept->order = empty_cuda(&size, 1, ScalarType::Int, view.device_index);
  }
  if (sizes.is_empty()) {
    torch::stable::zero_(out);
    return out;
  }
  const Device& gpu = device(view.device_index);
  const Tensor ids = as_contiguous(topk_ids);
  const ExpertOrder order = order_experts(gpu, TensorView(ids), sizes.experts);
  Tensor* before = kept == nullptr ? nullptr : &kept->before;
  const Tensor results =
      of_float8 ? float8_results(kFloat8OnCuda, quantize_rows_cuda(x, order.tokens_tensor()), w13,
                                 w2, given, order.ends_tensor(sizes.experts), before)
                : results_of(gpu, sizes, order, x, w13, w2, gating, before);
  if (kept != nullptr) kept->order = order.memory;
  sum_experts(gpu, results, order.places, sizes.k, summable(topk_weights), out);
  return out;
}

// As the gate's kernel reads it. Hooks on saved tensors may return one that begins anywhere.
Tensor in_vectors(const Tensor& kept) {
  const Tensor whole = as_contiguous(kept);
  const bool aligned = reinterpret_cast<uintptr_t>(TensorView(whole).data()) % 16 == 0;
  return aligned ? whole : torch::stable::clone(whole);
}

Tensor none_of(const TensorView& like) {
  const int64_t size = 0;
  return empty_cuda(&size, 1, like.dtype, like.device_index);
}

Tensor zeroed(Tensor tensor) {
  torch::stable::zero_(tensor);
  return tensor;
}

// A layer's backward of 8-bit floats. Rows live until they are quantised, so that it takes no more
// memory than one of 16 bits. Rows of no expert are not written, nor read for gradients of weights.
MoeGradients float8_backward(const Device& gpu, const MoeSizes& sizes, const ExpertOrder& order,
                             const Tensor& grad, const Tensor& x, const Tensor& topk_weights,
                             const Tensor& w13, const Tensor& w2, const Tensor& before,
                             const Float8Given& given, Gating gating, bool of_x, bool of_w13,
                             bool of_w2) {
  const Float8Steps& steps = kFloat8OnCuda;
  const TensorView view(x), weights(topk_weights);
  const Tensor ends = order.ends_tensor(sizes.experts), tokens = order.tokens_tensor(), none;
  std::optional<GroupBlocks> blocks;
  if (of_w13 || of_w2) blocks = find_group_blocks_cuda(ends, sizes.rows);
  MoeGradients out{none_of(view), none_of(weights), none_of(view), none_of(view)};
  auto& [x_grad, weights_grad, w13_grad, w2_grad] = out;
  QuantizedBoth outputs;
  if (of_w2) {
    outputs = quantize_both_cuda(grad, tokens, *blocks);
  } else {
    outputs.rows = quantize_rows_cuda(grad, tokens);
  }
  Tensor inside_grad = float8_input_gradient(steps, outputs.rows, w2, given.w2, ends);
  outputs.rows = {};
  Tensor inside = matrix(sizes.rows, sizes.inner, view);
  Tensor before_grad = matrix(sizes.rows, 2 * sizes.inner, view);
  const Tensor sums = empty_cuda(weights.sizes, weights.dim, ScalarType::Float, view.device_index);
  gate_experts(gpu, {in_vectors(before), order.places, sizes.rows, gating, inside,
                     ExpertGateBackward{inside_grad, summable(topk_weights), before_grad, sums}});
  weights_grad = narrow_to(sums, weights.dtype);
  inside_grad = none;
  if (of_w2) {
    const Quantized inputs = quantize_groups_cuda(inside, std::nullopt, *blocks);
    inside = none;
    w2_grad = float8_weight_gradient(steps, outputs.columns, inputs, TensorView(w2), *blocks);
  }
  inside = none;
  outputs = {};
  if (of_x && of_w13) {
    outputs = quantize_both_cuda(before_grad, std::nullopt, *blocks);
  } else if (of_x) {
    outputs.rows = quantize_rows_cuda(before_grad, std::nullopt);
  } else if (of_w13) {
    outputs.columns = quantize_groups_cuda(before_grad, std::nullopt, *blocks);
  }
  before_grad = none;
  if (of_x) {
    const Tensor of_rows = float8_input_gradient(steps, outputs.rows, w13, given.w13, ends);
    outputs.rows = {};
    x_grad = matrix(sizes.tokens, sizes.hidden, view);
    sum_experts(gpu, of_rows, order.places, sizes.k, std::nullopt, x_grad);
  }
  if (of_w13) {
    const Quantized inputs = quantize_groups_cuda(x, tokens, *blocks);
    w13_grad = float8_weight_gradient(steps, outputs.columns, inputs, TensorView(w13), *blocks);
  }
  return out;
}

}  // namespace

Tensor moe_cuda(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
                const Tensor& w13, const Tensor& w2, const std::string& activation,
                bool interleaved, const std::string& recipe) {
  const Gating gating{check_activation(activation, kMoeOp), interleaved};
  return run_moe(x, topk_ids, topk_weights, w13, w2, gating, recipe, {}, nullptr);
}

std::tuple<Tensor, Tensor, Tensor> moe_forward_cuda(const Tensor& x, const Tensor& topk_ids,
                                                    const Tensor& topk_weights, const Tensor& w13,
                                                    const Tensor& w2, const std::string& activation,
                                                    bool interleaved, const std::string& recipe,
                                                    const MoeCopies& copies) {
  MoeKept kept;
  const Gating gating{check_activation(activation, kMoeOp), interleaved};
  Tensor out = run_moe(x, topk_ids, topk_weights, w13, w2, gating, recipe, copies, &kept);
  return {out, kept.before, kept.order};
}

MoeGradients moe_backward_cuda(const Tensor& grad, const Tensor& x, const Tensor& topk_weights,
                               const Tensor& w13, const Tensor& w2, const Tensor& before,
                               const Tensor& order, const std::string& activation, bool interleaved,
                               bool of_x, bool of_w13, bool of_w2, const std::string& recipe,
                               const MoeCopies& copies) {
  const TensorView view(x), weights(topk_weights), first(w13), second(w2);
  const Gating gating{check_activation(activation, kMoeOp), interleaved};
  check_moe_backward(TensorView(grad), view, weights, first, second, TensorView(before),
                     TensorView(order));
  const bool of_float8 = is_of_float8(recipe, gating, view, copies.has_value());
  const Float8Given given(copies, true, first, second);
  const MoeSizes sizes(view, weights, second);
  MoeGradients out{none_of(view), none_of(weights), none_of(view), none_of(view)};
  auto& [x_grad, weights_grad, w13_grad, w2_grad] = out;
  if (sizes.is_empty()) {
    weights_grad = zeroed(empty_cuda(weights.sizes, 2, weights.dtype, weights.device_index));
    if (of_x) x_grad = zeroed(matrix(sizes.tokens, sizes.hidden, view));
    if (of_w13) w13_grad = as_weight(zeroed(weight_memory(first)), first);
    if (of_w2) w2_grad = as_weight(zeroed(weight_memory(second)), second);
    return out;
  }
  const Device& gpu = device(view.device_index);
  const ExpertOrder own(as_contiguous(order), sizes.rows);
  if (of_float8) {
    return float8_backward(gpu, sizes, own, grad, x, topk_weights, w13, w2, before, given, gating,
                           of_x, of_w13, of_w2);
  }
  const Tensor before_grad = matrix(sizes.rows, 2 * sizes.inner, view);
  {  // whose memory the other gradients take again
    const Tensor grad_rows = gathered_rows(gpu, grad, own.tokens, sizes.rows);
    GroupedOperands down(kMoeOp, grad_rows, w2, sizes.experts);
    const Tensor inside_grad = product(gpu, down, own, sizes.rows, sizes.inner, view);
    const Tensor inside = matrix(sizes.rows, sizes.inner, view);
    const Tensor sums =
        empty_cuda(weights.sizes, weights.dim, ScalarType::Float, view.device_index);
    gate_experts(gpu, {in_vectors(before), own.places, sizes.rows, gating, inside,
                       ExpertGateBackward{inside_grad, summable(topk_weights), before_grad, sums}});
    weights_grad = narrow_to(sums, weights.dtype);
    if (of_w2) w2_grad = weight_gradient(gpu, own, grad_rows, inside, second);
  }
  if (of_x) {
    GroupedOperands up(kMoeOp, before_grad, w13, sizes.experts);
    const Tensor of_rows = product(gpu, up, own, sizes.rows, sizes.hidden, view);
    x_grad = matrix(sizes.tokens, sizes.hidden, view);
    sum_experts(gpu, of_rows, own.places, sizes.k, std::nullopt, x_grad);
  }
  if (of_w13) {
    const Tensor rows = gathered_rows(gpu, x, own.tokens, sizes.rows);
    w13_grad = weight_gradient(gpu, own, before_grad, rows, first);
  }
  return out;
}

}  // namespace torch_cubin
