// Attention on CUDA: check -> plan -> launch. Gradients of broadcast operands are summed at the
// end. The gradient of sinks is an op of its own, from what a forward saved.
#include <algorithm>
#include <limits>

#include "cubin/error.h"
#include "kernels/attention/attention_params.h"
#include "ops/attention/api/attention.h"
#include "ops/attention/compose/compose.h"
#include "ops/attention/plan/plan.h"
#include "ops/attention/problem/operands.h"
#include "ops/common/argument_checks.h"
#include "ops/common/stable_ops.h"
#include "pytorch/contiguous.h"

namespace torch_cubin {
namespace {

// Without keys, no row sees any.
void fill_empty(Tensor& out, Tensor* logsumexp) {
  torch::stable::zero_(out);
  if (logsumexp != nullptr) {
    torch::stable::fill_(*logsumexp, -std::numeric_limits<double>::infinity());
  }
}

// The fused kernels. Returns false, having done nothing, if none supports this problem.
bool run_fused(const AttentionCall& call, Tensor& out, Tensor* logsumexp) {
  const AttentionShape& shape = call.shape;
  const AttentionKernels& kernels = attention_kernels(device(call.device_index));
  AttentionCase problem = attention_case(call);
  if (plan_forward(kernels, problem).kernels == nullptr) return false;

  FusedOperands operands(call);
  // Rows that are not whole vectors are written to a temporary tensor and copied to the output.
  const bool beside = operands.one_launch || !has_vector_rows(TensorView(out)) ||
                      (call.options.e4m3 && problem.head_dim_v != shape.head_dim_v);
  Tensor wide_out = out;
  if (beside) {
    Shape sizes = shape.out;
    sizes.sizes[sizes.dim - 1] = problem.head_dim_v;
    wide_out = empty_cuda(sizes.sizes, sizes.dim, call.out_dtype, call.device_index);
  }
  operands.problem.add(kOut, TensorView(wide_out));
  operands.problem.merge();

  problem.batch = operands.problem.batch();
  const ForwardPlan plan = plan_forward(kernels, planned_case(problem));
  // No kernel would write the rows outside all sequences.
  if (shape.packed && !plan.kernels->clears_empty_rows()) fill_empty(wide_out, logsumexp);
  float* sums = logsumexp != nullptr ? static_cast<float*>(logsumexp->mutable_data_ptr()) : nullptr;
  plan.kernels->launch(plan, problem, operands, sums);
  if (beside) {
    torch::stable::copy_(out, torch::stable::narrow(wide_out, -1, 0, shape.head_dim_v));
  }
  return true;
}

}  // namespace

std::tuple<Tensor, Tensor> attention_forward_cuda(AttentionArguments arguments,
                                                  bool want_logsumexp) {
  const AttentionCall call(std::move(arguments));
  const AttentionShape& shape = call.shape;
  Tensor out = empty_laid_out(call.q, shape.out, call.out_dtype), logsumexp;
  if (want_logsumexp) {
    logsumexp = empty_cuda(shape.logsumexp.sizes, shape.logsumexp.dim, sums_dtype(call.dtype),
                           call.device_index);
  }
  Tensor* const sums = want_logsumexp ? &logsumexp : nullptr;
  const bool wanted = want_logsumexp && shape.logsumexp.numel() > 0;
  if (shape.out.numel() == 0 && !wanted) return {out, logsumexp};
  const bool no_keys = shape.seqlen_k == 0 || shape.kv_heads == 0;
  if (no_keys && !call.options.sinks) {
    fill_empty(out, sums);
    return {out, logsumexp};
  }
  // Packed sequences are never composed; the kernels also handle sinks without keys.
  const bool fusable = shape.out.numel() > 0 && (!no_keys || shape.packed);
  if (fusable && run_fused(call, out, sums)) {
    return {out, logsumexp};
  }
  if (call.options.e4m3) {
    fail({"no_kernel", "attention_forward_e4m3", "has no kernel for float8_e4m3fn",
          "kernels of float8_e4m3fn, which sm_90a has, and head dims up to 256",
          "none for head_dim " + std::to_string(shape.head_dim) + " and " +
              std::to_string(shape.head_dim_v),
          "Convert query, key and value with .to(torch.bfloat16) on this GPU."});
  }
  const auto [composed, lse] = compose_forward(compose_inputs(call), call.settings, want_logsumexp);
  torch::stable::copy_(out, torch::stable::reshape(composed, shape.out.vector()));
  if (want_logsumexp) {
    torch::stable::copy_(logsumexp, torch::stable::reshape(lse, shape.logsumexp.vector()));
  }
  return {out, logsumexp};
}

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

namespace {

void check_sinks_gradient(const TensorView& grad_out, const TensorView& out,
                          const TensorView& logsumexp, const TensorView& sinks) {
  constexpr const char* kOp = "_attention_sinks_gradient";
  check_like(kOp, "grad_out", grad_out, "out", out);
  check_side(kOp, "logsumexp", logsumexp, "out", out, ScalarType::Float);
  check_side(kOp, "sinks", sinks, "out", out, ScalarType::Float);
  const bool fits = out.dim == 4 && grad_out.dim == 4 && logsumexp.dim == 3 && sinks.dim == 1 &&
                    std::equal(out.sizes, out.sizes + 4, grad_out.sizes) &&
                    std::equal(out.sizes, out.sizes + 3, logsumexp.sizes) &&
                    sinks.sizes[0] == out.sizes[1];
  if (!fits) {
    fail({"input", kOp, "has shapes that do not fit together",
          "(batch, heads, rows, head_dim) twice, (batch, heads, rows) and (heads,)",
          grad_out.shape_text() + ", " + out.shape_text() + ", " + logsumexp.shape_text() +
              " and " + sinks.shape_text(),
          ""});
  }
}

}  // namespace

// A term for each row, by portable/delta.cu, then their sum. torch_cubin/_ops/attention_autograd.py
// calls it, and has the formula for calls that it does not support.
Tensor attention_sinks_gradient_cuda(const Tensor& grad_out, const Tensor& out,
                                     const Tensor& logsumexp, const Tensor& sinks) {
  const TensorView view(out);
  check_sinks_gradient(TensorView(grad_out), view, TensorView(logsumexp), TensorView(sinks));
  Tensor terms = empty_cuda(view.sizes, 3, ScalarType::Float, view.device_index);
  if (has_elements(view.sizes, 3)) {
    const Tensor grad = vector_rows(grad_out), result = vector_rows(out);
    const Tensor sums = torch::stable::contiguous(logsumexp);
    const Tensor of_heads = torch::stable::contiguous(sinks);
    AttentionParams p{};
    p.out = const_cast<void*>(TensorView(result).data());
    std::copy_n(TensorView(result).strides, 3, p.out_stride);
    p.grad_out = TensorView(grad).data();
    std::copy_n(TensorView(grad).strides, 3, p.grad_out_stride);
    p.logsumexp = const_cast<float*>(static_cast<const float*>(TensorView(sums).data()));
    p.sinks = static_cast<const float*>(TensorView(of_heads).data());
    p.delta = static_cast<const float*>(terms.data_ptr());
    p.batch = static_cast<int>(view.sizes[0]);
    p.heads = static_cast<int>(view.sizes[1]);
    p.group = 1;
    p.seqlen_q = p.total_q = static_cast<int>(view.sizes[2]);
    p.head_dim_v = static_cast<int>(TensorView(result).sizes[3]);
    p.flags = kAttendSinkTerms;
    const auto& kernels = attention_kernels(device(view.device_index)).backward;
    const bool done = std::any_of(kernels.begin(), kernels.end(), [&](const auto& each) {
      return each->launch_sink_terms(view.dtype, p);
    });
    if (!done) {
      fail({"no_kernel", "the gradient of attention sinks", "has no kernel", "",
            dtype_name(view.dtype), ""});
    }
  }
  return torch::stable::sum(terms, {{0, 2}}, false);
}

}  // namespace torch_cubin
