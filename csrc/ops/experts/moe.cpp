// moe on CUDA: the tokens' order, the gated product of gathered rows, the second product, the sum.
#include "cubin/error.h"
#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/experts/experts.h"
#include "ops/grouped/operands.h"
#include "ops/matmul/checks.h"

namespace torch_cubin {
namespace {

Tensor matrix(int64_t rows, int64_t columns, const TensorView& like) {
  const int64_t sizes[] = {rows, columns};
  return empty_cuda(sizes, 2, like.dtype, like.device_index);
}

// Runs the product of groups whose ends are the order's, into a new tensor of `columns`.
Tensor product(const Device& device, GroupedOperands& operands, const ExpertOrder& order,
               int64_t rows, int64_t columns, const TensorView& like) {
  Tensor out = matrix(rows, columns, like);
  GroupedCall& call = operands.call;
  call.m = rows;
  call.n = columns;
  call.ends = order.ends;
  call.out = static_cast<char*>(out.mutable_data_ptr());
  run_sm90_grouped(device, call);
  return out;
}

}  // namespace

Tensor moe_cuda(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
                const Tensor& w13, const Tensor& w2, const std::string& activation) {
  const TensorView tokens(x), second(w2);
  const Activation gate = check_activation(activation);
  check_moe(tokens, TensorView(topk_ids), TensorView(topk_weights), TensorView(w13), second);
  check_grouped_dtype(kMoeOp, tokens.dtype, "PyTorch's products");
  const int64_t experts = second.sizes[0], hidden = second.sizes[1], inner = second.sizes[2];
  Tensor out = matrix(tokens.sizes[0], hidden, tokens);
  const Tensor ids = as_contiguous(topk_ids);
  const int64_t rows = TensorView(ids).sizes[0] * TensorView(ids).sizes[1];
  if (tokens.sizes[0] == 0 || hidden == 0) return out;
  if (rows == 0 || inner == 0) {
    torch::stable::zero_(out);
    return out;
  }
  constexpr int64_t kMostRows = INT32_MAX / 2;
  if (rows > kMostRows) {
    fail({"no_kernel", kMoeOp, "has more ids than a kernel takes",
          "at most " + std::to_string(kMostRows), std::to_string(rows), "Pass fewer tokens."});
  }
  const Device& gpu = device(tokens.device_index);
  const ExpertOrder order(gpu, TensorView(ids), experts);
  GroupedOperands gated(kMoeOp, x, w13, experts, gate);
  gated.call.rows = order.tokens;
  gated.call.a_height = tokens.sizes[0];
  const Tensor inside = product(gpu, gated, order, rows, inner, tokens);
  GroupedOperands down(kMoeOp, inside, w2, experts, kActivationNone);
  const Tensor results = product(gpu, down, order, rows, hidden, tokens);
  sum_experts(gpu, results, order.places, TensorView(ids).sizes[1], summable(topk_weights), out);
  return out;
}

}  // namespace torch_cubin
