// Schemas and registrations of the attention family, without logic.
//
// csrc/ops_matmul.cpp explains the relation of the public op, `_name` and `_name_autograd`.
#include <torch/csrc/stable/library.h>

#include "op_registration.h"
#include "ops/attention/api/attention.h"
#include "ops/attention/api/signatures.h"
#include "ops/attention/compose/softmax.h"

namespace {

using namespace torch_cubin;

STABLE_TORCH_LIBRARY_FRAGMENT(cubin, m) {
  m.def(sdpa_signature().schema("scaled_dot_product_attention").c_str());
  m.def(raw_sdpa_signature().schema("_scaled_dot_product_attention").c_str());
  m.def(flash_signature().schema("flash_attention").c_str());
  define_public(m, "attention_forward", forward_signature().schema(""));
  define_public(m, "attention_backward", backward_signature().schema(""));
  define_public(m, "attention_forward_e4m3", e4m3_signature().schema(""));
  define_public(m, "attention_backward_e4m3", e4m3_backward_signature().schema(""));
  define_public(m, "flash_attention_with_kvcache", kv_cache_signature().schema(""));

  m.def(softmax_signature().schema("_attention_softmax").c_str());
  m.def(softmax_backward_signature().schema("_attention_softmax_backward").c_str());
  m.def(
      "_attention_sinks_gradient(Tensor grad_out, Tensor out, Tensor logsumexp, Tensor sinks) -> "
      "Tensor");
  m.def(dropout_signature().schema("_attention_dropout").c_str());
}

void implement_attention_ops(OpLibrary& m) {
  TC_BY_GRAD_MODE("attention_forward", "query", "key", "value");
  TC_BY_GRAD_MODE("attention_forward_e4m3", "query", "key", "value");
  TC_BY_GRAD_MODE("attention_backward", "grad_out", "query", "key", "value", "out", "logsumexp");
  TC_BY_GRAD_MODE("attention_backward_e4m3", "grad_out", "query", "key", "value", "out",
                  "logsumexp");
  TC_BY_GRAD_MODE("flash_attention_with_kvcache", "q", "k_cache", "v_cache");
  m.impl("scaled_dot_product_attention", &scaled_dot_product_attention_composite);
  m.impl("flash_attention", &flash_attention_composite);
}

STABLE_TORCH_LIBRARY_IMPL(cubin, CompositeImplicitAutograd, m) { implement_attention_ops(m); }

// Without this registration torch.vmap would loop over the batch instead of decomposing the op.
STABLE_TORCH_LIBRARY_IMPL(cubin, FuncTorchBatchedDecomposition, m) { implement_attention_ops(m); }

// Dropout draws a random number, which must follow torch.vmap's randomness rules even if no
// argument is batched. Below this key one draw would serve the whole batch.
STABLE_TORCH_LIBRARY_IMPL(cubin, FuncTorchVmapMode, m) {
  m.impl("scaled_dot_product_attention", &scaled_dot_product_attention_composite);
  m.impl("flash_attention", &flash_attention_composite);
}

constexpr bool kReferences_cpu = true,
               kReferences_cuda = false;  // whether a reference serves a device

#define TC_RAW_ATTENTION_OPS(device)                                                              \
  TC_BOXED(scaled_dot_product_attention, device,                                                  \
           boxed_sdpa<attention_forward_##device, kReferences_##device>);                         \
  TC_BOXED_AND_AUTOGRAD(attention_forward, device,                                                \
                        boxed_forward<attention_forward_##device, kReferences_##device>);         \
  TC_BOXED_AND_AUTOGRAD(attention_forward_e4m3, device,                                           \
                        boxed_forward<attention_forward_##device, kReferences_##device, true>);   \
  TC_BOXED_AND_AUTOGRAD(attention_backward, device,                                               \
                        boxed_backward<attention_backward_##device, kReferences_##device>);       \
  TC_BOXED_AND_AUTOGRAD(attention_backward_e4m3, device,                                          \
                        boxed_backward<attention_backward_##device, kReferences_##device, true>); \
  TC_BOXED_AND_AUTOGRAD(                                                                          \
      flash_attention_with_kvcache, device,                                                       \
      boxed_kv_cache<flash_attention_with_kvcache_##device, kReferences_##device>);               \
  m.impl("_attention_softmax", &boxed_softmax);                                                   \
  m.impl("_attention_softmax_backward", &boxed_softmax_backward);                                 \
  m.impl("_attention_dropout", &boxed_dropout)

STABLE_TORCH_LIBRARY_IMPL(cubin, CPU, m) { TC_RAW_ATTENTION_OPS(cpu); }
STABLE_TORCH_LIBRARY_IMPL(cubin, CUDA, m) {
  TC_RAW_ATTENTION_OPS(cuda);
  m.impl("_attention_sinks_gradient", TORCH_BOX(&attention_sinks_gradient_cuda));
}

}  // namespace
