// The gradient of attention's sinks, (heads,), from what a forward saved: portable/delta.cu
// computes a term for each row, then they are summed. torch_cubin/_ops/attention_autograd.py calls
// it, and has the formula for calls that it does not support.
#include <algorithm>

#include "cubin/error.h"
#include "kernels/attention/attention_params.h"
#include "ops/attention/api/attention.h"
#include "ops/attention/plan/plan.h"
#include "ops/attention/problem/operands.h"
#include "ops/attention/problem/problem.h"
#include "ops/common/argument_checks.h"
#include "ops/common/stable_ops.h"
#include "pytorch/contiguous.h"

namespace torch_cubin {
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
    p.out = const_cast<void*>(result.data_ptr());
    std::copy_n(TensorView(result).strides, 3, p.out_stride);
    p.grad_out = grad.data_ptr();
    std::copy_n(TensorView(grad).strides, 3, p.grad_out_stride);
    p.logsumexp = const_cast<float*>(static_cast<const float*>(sums.data_ptr()));
    p.sinks = static_cast<const float*>(of_heads.data_ptr());
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
