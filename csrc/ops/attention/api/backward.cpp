// Attention backward on CUDA: check -> plan -> launch. Gradients of broadcast operands are summed
// at the end.
#include "cubin/error.h"
#include "ops/attention/api/attention.h"
#include "ops/attention/compose/compose.h"
#include "ops/attention/plan/plan.h"
#include "ops/attention/problem/operands.h"
#include "ops/common/stable_ops.h"

namespace torch_cubin {
namespace {

// Where a kernel writes the gradient of one operand: the result itself, or a temporary tensor if
// rows are not whole vectors or the operand was broadcast.
struct Gradient {
  Tensor result, written;
  int64_t columns;  // of the result
  bool direct;

  Gradient(const AttentionCall& call, const TensorView& operand, int64_t heads, bool beside)
      : result(empty_laid_out(operand, shape_of(operand), call.out_dtype)),
        columns(operand.sizes[operand.dim - 1]) {
    const AttentionShape& shape = call.shape;
    Shape whole = shape.batch;
    if (shape.has_heads) whole.append(heads);
    whole.append(operand.sizes[operand.dim - 2]);
    whole.append(columns);
    direct =
        (shape.packed || whole.is_of(operand)) && !beside && has_vector_rows(TensorView(result));
    if (direct) {
      written = result;
      return;
    }
    if (shape.packed) whole = shape_of(operand);
    whole.sizes[whole.dim - 1] = padded_columns(columns, call.out_dtype);
    written = empty_cuda(whole.sizes, whole.dim, call.out_dtype, call.device_index);
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

Gradients run_fused_backward(const AttentionCall& call, const AttentionKernels& kernels,
                             AttentionCase problem, const Tensor& grad_out, const Tensor& out,
                             const Tensor& logsumexp) {
  const AttentionShape& shape = call.shape;
  FusedOperands operands(call);
  const bool one_launch = operands.one_launch;
  const auto readable = [&](const Tensor& tensor) {
    return vector_rows(one_launch ? torch::stable::contiguous(tensor) : tensor);
  };
  const Tensor aligned_grad = readable(grad_out), aligned_out = readable(out);
  const Tensor lse = torch::stable::contiguous(logsumexp);
  Gradient dq(call, call.q, shape.heads, one_launch);
  Gradient dk(call, call.k, shape.kv_heads, one_launch);
  Gradient dv(call, call.v, shape.kv_heads, one_launch);
  operands.problem.add(kGradOut, TensorView(aligned_grad));
  operands.problem.add(kOut, TensorView(aligned_out));
  operands.problem.add(kGradQuery, TensorView(dq.written));
  operands.problem.add(kGradKey, TensorView(dk.written));
  operands.problem.add(kGradValue, TensorView(dv.written));
  operands.problem.merge();

  problem.batch = operands.problem.batch();
  const BackwardPlan plan = plan_backward(kernels, planned_case(problem));
  // No kernel would write the rows outside all sequences.
  if (shape.packed && !plan.kernels->clears_empty_rows()) {
    for (Gradient* each : {&dq, &dk, &dv}) torch::stable::zero_(each->written);
  }
  plan.kernels->launch(plan, problem, operands, static_cast<const float*>(lse.data_ptr()));
  return {dq.finish(call), dk.finish(call), dv.finish(call)};
}

Tensor zeros_like_operand(const AttentionCall& call, const TensorView& operand) {
  Tensor out = empty_laid_out(operand, shape_of(operand), call.out_dtype);
  return torch::stable::zero_(out);
}

}  // namespace

Gradients attention_backward_cuda(AttentionArguments arguments, const Tensor& grad_out,
                                  const Tensor& out, const Tensor& logsumexp) {
  const AttentionCall call(std::move(arguments));
  const AttentionShape& shape = call.shape;
  check_attention_backward(call.op, shape, call.q, TensorView(grad_out), TensorView(out),
                           TensorView(logsumexp));
  if (shape.logsumexp.numel() == 0 || shape.seqlen_k == 0 || shape.kv_heads == 0 ||
      shape.head_dim_v == 0) {
    return {zeros_like_operand(call, call.q), zeros_like_operand(call, call.k),
            zeros_like_operand(call, call.v)};
  }
  // The kernels of float8_e4m3fn read rows of whole vectors, also of the tensors of 16 bits.
  const bool whole = !call.options.e4m3 || (shape.head_dim % 16 == 0 && shape.head_dim_v % 16 == 0);
  if (shape.head_dim > 0 && whole) {
    const AttentionKernels& kernels = attention_kernels(device(call.device_index));
    const AttentionCase problem = attention_case(call);
    if (plan_backward(kernels, problem).kernels != nullptr) {
      return run_fused_backward(call, kernels, problem, grad_out, out, logsumexp);
    }
  }
  if (call.options.e4m3) {
    fail(
        {"no_kernel", call.op, "has no kernel for this call",
         "kernels of float8_e4m3fn, which sm_90a has, and head dims that are multiples of 16 up to "
         "128",
         "head_dim " + std::to_string(shape.head_dim) + " and " + std::to_string(shape.head_dim_v),
         "Call attention_backward with the tensors in bfloat16."});
  }
  const auto [dq, dk, dv] = compose_gradients(call, grad_out, out, logsumexp);
  const auto finish = [&](const Tensor& grad, const TensorView& operand) {
    Tensor result = empty_laid_out(operand, shape_of(operand), call.dtype);
    torch::stable::copy_(result, grad);
    return result;
  };
  return {finish(dq, call.q), finish(dk, call.k), finish(dv, call.v)};
}

}  // namespace torch_cubin
