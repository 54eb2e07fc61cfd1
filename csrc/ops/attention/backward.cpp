// Attention backward on CUDA: check -> choose -> launch.
//
// Three kernels in a row. For 16-bit types: delta (the rows' sums of grad_out * out; it also clears
// the counters by which blocks add to dq in a fixed order), backward, and convert, which rounds the
// float sums of dq. For float32: delta, then one kernel for dk and dv and one for dq, which share
// nothing. Gradients of operands that were broadcast are summed at the end.
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "ops/attention/arguments.h"
#include "ops/attention/attention.h"
#include "ops/attention/fused_operands.h"
#include "ops/attention/operands.h"

namespace torch_cubin {
namespace {

// With so few rows of queries float32's kernel of dq has a block a head, and the scores that a
// composition holds are small. It is also the more exact where a gradient has one term: a product
// of three of TF32 has twice the error of float32's.
constexpr int64_t kFewRows = 16;

struct Kernels {
  CatalogKernel* delta = nullptr;
  const AttentionTable::Row* backward = nullptr;
  CatalogKernel* convert = nullptr;
  const AttentionTable::Row* gradient_k = nullptr;
  const AttentionTable::Row* gradient_q = nullptr;

  bool joined() const { return backward != nullptr && convert != nullptr; }
  bool apart() const { return gradient_k != nullptr && gradient_q != nullptr; }
  bool complete() const { return delta != nullptr && (joined() || apart()); }
};

Kernels find_kernels(const AttentionTable& table, const AttentionCall& call, int64_t head_dim) {
  Kernels found;
  const AttentionDtype dtype = attention_dtype(call.dtype);
  if (dtype == kAttendDtypes) return found;
  const AttentionVariant variant = attention_variant(call.settings, call.options);
  found.backward = narrowest(table.backward[dtype][variant], head_dim);
  found.gradient_k = narrowest(table.gradient_k[dtype], head_dim);
  found.gradient_q = narrowest(table.gradient_q[dtype], head_dim);
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

// Where the blocks of a backward kernel add up dq, and the counters of their turns; see
// backward_attention_dq.cuh.
struct DqSum {
  Tensor sum, turns;
  int64_t tiles_of_head = 0;

  DqSum() = default;
  DqSum(const AttentionCall& call, const Tensor& query, int64_t batch, int64_t head_dim,
        int64_t delta_blocks, AttentionParams& params)
      : tiles_of_head(ceil_div(call.shape.seqlen_q, 16)) {
    const AttentionShape& shape = call.shape;
    int64_t tiles = batch * shape.heads * tiles_of_head;
    if (shape.packed) {
      tiles = shape.heads * (TensorView(query).sizes[0] / 16 + shape.batch.sizes[0]);
    }
    const int64_t floats = tiles * 16 * head_dim;
    sum = empty_cuda(&floats, 1, ScalarType::Float, call.device_index);
    turns = empty_cuda(&delta_blocks, 1, ScalarType::Int, call.device_index);  // one a block
    params.dq_sum = static_cast<float*>(sum.mutable_data_ptr());
    params.dq_turn = static_cast<int*>(turns.mutable_data_ptr());
  }
};

using Gradients = std::tuple<Tensor, Tensor, Tensor>;

Gradients run_fused_backward(const AttentionCall& call, const Kernels& kernels,
                             const Tensor& grad_out, const Tensor& query, const Tensor& key,
                             const Tensor& value, const Tensor& out, const Tensor& logsumexp) {
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
  const int64_t lse_rows = shape.logsumexp.numel() / parts;
  Tensor delta = empty_cuda(&lse_rows, 1, ScalarType::Float, call.device_index);
  AttentionParams params = operands.params(head_dim, padded_columns(shape.head_dim_v, call.dtype));
  params.delta = static_cast<const float*>(delta.data_ptr());
  const int64_t delta_rows = kernels.delta->entry().tile[0];
  const int64_t delta_blocks = batch * shape.heads * ceil_div(shape.seqlen_q, delta_rows);
  DqSum sum;
  if (kernels.joined()) sum = DqSum(call, query, batch, head_dim, delta_blocks, params);
  float* logsumexps = const_cast<float*>(static_cast<const float*>(lse.data_ptr()));
  for (int64_t part = 0; part < parts; ++part) {
    operands.fill(params, part);
    params.logsumexp = logsumexps + part * lse_rows;
    const auto run = [&](CatalogKernel& kernel, int64_t blocks) {
      launch_attention(kernel, params, blocks, 1, gpu);
    };
    const auto run_keys = [&](const AttentionTable::Row& row) {
      run(*row.kernel, batch * shape.kv_heads * ceil_div(shape.seqlen_k, row.columns));
    };
    run(*kernels.delta, delta_blocks);
    if (kernels.joined()) {
      run_keys(*kernels.backward);
      const int64_t warps = kernels.convert->entry().block[0] / 32;
      run(*kernels.convert, ceil_div(batch * shape.heads * sum.tiles_of_head, warps));
    } else {
      run_keys(*kernels.gradient_k);
      const AttentionTable::Row& row = *kernels.gradient_q;
      run(*row.kernel, batch * shape.heads * ceil_div(shape.seqlen_q, row.rows));
    }
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
  const bool few = !kernels.joined() && !shape.packed && shape.seqlen_q <= kFewRows;
  if (kernels.complete() && shape.head_dim > 0 && !few) {
    return run_fused_backward(call, kernels, grad_out, query, key, value, out, logsumexp);
  }
  return run_composed(call, grad_out, query, key, value, out, logsumexp);
}

}  // namespace torch_cubin
