// Attention forward on CUDA: check -> plan -> launch. The backward is in backward.cpp.
#include <limits>

#include "cubin/error.h"
#include "ops/attention/api/attention.h"
#include "ops/attention/compose/compose.h"
#include "ops/attention/plan/plan.h"
#include "ops/attention/problem/operands.h"
#include "ops/common/stable_ops.h"

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

}  // namespace torch_cubin
