// Schemas and registrations of mixtures of experts, without logic; torch_cubin.moe calls them.
#include <torch/csrc/stable/library.h>

#include "op_registration.h"
#include "ops/experts/experts.h"

namespace {

using namespace torch_cubin;

STABLE_TORCH_LIBRARY_FRAGMENT(cubin, m) {
  define_raw(
      m, "moe",
      "(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w2, str activation, "
      "bool interleaved, str recipe=\"none\") -> Tensor");
  define_raw(
      m, "moe_float8",
      "(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w13_scale, Tensor w2, "
      "Tensor w2_scale) -> Tensor");
  m.def(
      "_moe_forward(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w2, "
      "str activation, bool interleaved, str recipe=\"none\", Tensor[]? copies=None) -> "
      "(Tensor out, Tensor before, Tensor order)");
  m.def(
      "_float8_copies(Tensor weight) -> "
      "(Tensor data, Tensor scale, Tensor data_of_transpose, Tensor scale_of_transpose)");
  m.def(
      "_moe_backward(Tensor grad, Tensor x, Tensor topk_weights, Tensor w13, Tensor w2, "
      "Tensor before, Tensor order, str activation, bool interleaved, bool of_x, bool of_w13, "
      "bool of_w2, str recipe=\"none\", Tensor[]? copies=None) -> "
      "(Tensor grad_x, Tensor grad_topk_weights, Tensor grad_w13, Tensor grad_w2)");
  define_raw(m, "expert_rows", "(Tensor x, Tensor tokens, Tensor order, Tensor places) -> Tensor");
  define_raw(
      m, "expert_sum",
      "(Tensor rows, Tensor tokens, Tensor order, Tensor places, Tensor? topk_weights) -> Tensor");
}

#define TC_EXPERTS_OPS(device)              \
  TC_RAW_AND_AUTOGRAD(moe, device);         \
  TC_RAW_AND_AUTOGRAD(moe_float8, device);  \
  TC_RAW(float8_copies, device);            \
  TC_RAW(moe_forward, device);              \
  TC_RAW(moe_backward, device);             \
  TC_RAW_AND_AUTOGRAD(expert_rows, device); \
  TC_RAW_AND_AUTOGRAD(expert_sum, device)

STABLE_TORCH_LIBRARY_IMPL(cubin, CPU, m) { TC_EXPERTS_OPS(cpu); }
STABLE_TORCH_LIBRARY_IMPL(cubin, CUDA, m) { TC_EXPERTS_OPS(cuda); }

}  // namespace
