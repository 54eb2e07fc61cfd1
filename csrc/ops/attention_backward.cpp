// Attention backward on CUDA: check -> choose -> launch.
//
// Three kernels in a row: delta (the rows' sums of grad_out * out; it also clears the counters by
// which blocks add to dq in a fixed order), backward, and convert, which rounds the float sums of
// dq. Gradients of operands that were broadcast are summed at the end.
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "ops/attention.h"
#include "ops/attention_arguments.h"
#include "ops/attention_launch.h"
#include "ops/attention_operands.h"

namespace torch_cubin {
namespace {

struct Kernels {
  const AttentionTable::Row* backward = nullptr;
  CatalogKernel* delta = nullptr;
  CatalogKernel* convert = nullptr;

  bool complete() const { return backward != nullptr && delta != nullptr && convert != nullptr; }
};

Kernels find_kernels(const AttentionTable& table, const AttentionCall& call, int64_t head_dim) {
  Kernels found;
  const AttentionDtype dtype = attention_dtype(call.dtype);
  if (dtype == kAttendDtypes) return found;
  const AttentionVariant variant = attention_variant(call.settings, call.options);
  found.backward = narrowest(table.backward[dtype][variant], head_dim);
  if (!table.delta[dtype].empty()) found.delta = table.delta[dtype][0].kernel;
  if (!table.convert[dtype].empty()) found.convert = table.convert[dtype][0].kernel;
  return found;
}

// Where a kernel writes the gradient of one operand: the result itself, or, where rows are no whole
// vectors or the operand was broadcast, a tensor beside it.
struct Gradient {
  Tensor result, written;
  int64_t columns;  // of the result
  bool direct;

  Gradient(const AttentionCall& call, const TensorView& operand, int64_t heads, bool beside)
      : result(empty_laid_out(operand, shape_of(operand), call.dtype)),
        columns(operand.sizes[operand.dim - 1]) {
    const AttentionShape& shape = call.shape;
    Shape whole = shape.batch;
    if (shape.has_heads) whole.sizes[whole.dim++] = heads;
    whole.sizes[whole.dim++] = operand.sizes[operand.dim - 2];
    whole.sizes[whole.dim++] = columns;
    const bool own =
        shape.packed || (operand.dim == whole.dim &&
                         std::equal(operand.sizes, operand.sizes + operand.dim, whole.sizes));
    direct = own && !beside && has_vector_rows(TensorView(result));
    if (direct) {
      written = result;
      return;
    }
    if (shape.packed) whole = shape_of(operand);
    whole.sizes[whole.dim - 1] = padded_columns(columns, call.dtype);
    written = empty_cuda(whole.sizes, whole.dim, call.dtype, call.device_index);
  }

  Tensor finish(const AttentionCall& call) {
    if (direct) return result;
    Tensor whole = torch::stable::narrow(written, -1, 0, columns);
    if (!call.shape.packed) whole = sum_to_operand(whole, call.shape, TensorView(result));
    torch::stable::copy_(result, whole);
    return result;
  }
};

using Gradients = std::tuple<Tensor, Tensor, Tensor>;

Gradients run_fused(const AttentionCall& call, const Kernels& kernels, const Tensor& grad_out,
                    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
                    const Tensor& logsumexp) {
  const AttentionShape& shape = call.shape;
  const Device& gpu = device(call.device_index);
  const int64_t head_dim = padded_columns(shape.head_dim, call.dtype);
  FusedOperands operands(call, query, key, value);
  const bool one_launch = operands.one_launch;
  const auto readable = [&](const Tensor& tensor) {
    return vector_rows(one_launch ? torch::stable::contiguous(tensor) : tensor);
  };
  const Tensor aligned_grad = readable(grad_out), aligned_out = readable(out);
  const Tensor lse = torch::stable::contiguous(logsumexp);
  Gradient dq(call, TensorView(query), shape.heads, one_launch);
  Gradient dk(call, TensorView(key), shape.kv_heads, one_launch);
  Gradient dv(call, TensorView(value), shape.kv_heads, one_launch);
  // Rows of no sequence, and columns of padding, would keep what the memory held.
  if (shape.packed) {
    for (Gradient* each : {&dq, &dk, &dv}) torch::stable::zero_(each->written);
  }
  operands.problem.add(kGradOut, TensorView(aligned_grad));
  operands.problem.add(kOut, TensorView(aligned_out));
  operands.problem.add(kGradQuery, TensorView(dq.written));
  operands.problem.add(kGradKey, TensorView(dk.written));
  operands.problem.add(kGradValue, TensorView(dv.written));
  operands.problem.merge();

  const int64_t batch = operands.problem.batch(), parts = operands.problem.parts();
  const int64_t tiles = (shape.seqlen_q + 15) / 16;  // of dq_sum, see backward_attention_dq.cuh
  int64_t sum_tiles = batch * shape.heads * tiles;
  if (shape.packed) {
    sum_tiles = shape.heads * (TensorView(query).sizes[0] / 16 + shape.batch.sizes[0]);
  }
  const int64_t floats = sum_tiles * 16 * head_dim;
  const int64_t lse_rows = shape.logsumexp.numel() / parts;
  Tensor dq_sum = empty_cuda(&floats, 1, ScalarType::Float, call.device_index);
  Tensor delta = empty_cuda(&lse_rows, 1, ScalarType::Float, call.device_index);

  AttentionParams params = operands.params(head_dim, padded_columns(shape.head_dim_v, call.dtype));
  params.dq_sum = static_cast<float*>(dq_sum.mutable_data_ptr());
  params.delta = static_cast<const float*>(delta.data_ptr());
  const int64_t columns = kernels.backward->columns;
  const int64_t blocks = batch * shape.kv_heads * ((shape.seqlen_k + columns - 1) / columns);
  const int64_t delta_rows = kernels.delta->entry().tile[0];
  const int64_t delta_blocks =
      batch * shape.heads * ((shape.seqlen_q + delta_rows - 1) / delta_rows);
  Tensor turns = empty_cuda(&delta_blocks, 1, ScalarType::Int, call.device_index);  // one a block
  params.dq_turn = static_cast<int*>(turns.mutable_data_ptr());
  const int64_t convert_warps = kernels.convert->entry().block[0] / 32;
  float* logsumexps = const_cast<float*>(static_cast<const float*>(lse.data_ptr()));
  for (int64_t part = 0; part < parts; ++part) {
    operands.fill(params, part);
    params.logsumexp = logsumexps + part * lse_rows;
    launch_attention(*kernels.delta, params, delta_blocks, 1, gpu);
    launch_attention(*kernels.backward->kernel, params, blocks, 1, gpu);
    launch_attention(*kernels.convert, params,
                     (batch * shape.heads * tiles + convert_warps - 1) / convert_warps, 1, gpu);
  }
  return {dq.finish(call), dk.finish(call), dv.finish(call)};
}

Tensor zeros_like_operand(const AttentionCall& call, const TensorView& operand) {
  Tensor out = empty_laid_out(operand, shape_of(operand), call.dtype);
  return torch::stable::zero_(out);
}

Gradients run_composed(const AttentionCall& call, const Tensor& grad_out, const Tensor& query,
                       const Tensor& key, const Tensor& value, const Tensor& out,
                       const Tensor& logsumexp) {
  const AttentionShape& shape = call.shape;
  const ComposeInputs in = compose_inputs(call, query, key, value);
  const TensorView q(in.query);
  const int64_t batch = q.sizes[0];
  const std::vector<int64_t> wide = {batch, shape.heads, shape.seqlen_q, shape.head_dim_v};
  const auto [dq, dk, dv] = compose_backward(
      in, call.settings, torch::stable::reshape(grad_out, wide), torch::stable::reshape(out, wide),
      torch::stable::reshape(logsumexp, {batch, shape.heads, shape.seqlen_q}));
  const auto finish = [&](const Tensor& grad, const Tensor& operand) {
    const TensorView view(operand);
    Tensor result = empty_laid_out(view, shape_of(view), call.dtype);
    torch::stable::copy_(result, sum_to_operand(grad, shape, view));
    return result;
  };
  return {finish(dq, query), finish(dk, key), finish(dv, value)};
}

}  // namespace

Gradients attention_backward_cuda(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                  const Tensor& value, const Tensor& out, const Tensor& logsumexp,
                                  TC_ATTENTION_ARGUMENTS) {
  const AttentionCall call("attention_backward", query, key, value, TC_ATTENTION_OPTIONS);
  const AttentionShape& shape = call.shape;
  const TensorView q(query), k(key), v(value);
  check_attention_backward(shape, q, TensorView(grad_out), TensorView(out), TensorView(logsumexp));
  if (shape.logsumexp.numel() == 0 || shape.seqlen_k == 0 || shape.kv_heads == 0 ||
      shape.head_dim_v == 0) {
    return {zeros_like_operand(call, q), zeros_like_operand(call, k), zeros_like_operand(call, v)};
  }
  const int64_t widest = padded_columns(std::max(shape.head_dim, shape.head_dim_v), call.dtype);
  const Kernels kernels = find_kernels(attention_table(device(call.device_index)), call, widest);
  if (kernels.complete() && shape.head_dim > 0) {
    return run_fused(call, kernels, grad_out, query, key, value, out, logsumexp);
  }
  return run_composed(call, grad_out, query, key, value, out, logsumexp);
}

}  // namespace torch_cubin
