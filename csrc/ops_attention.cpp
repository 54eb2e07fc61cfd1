// Schemas and registrations of the attention family, without logic.
//
// csrc/ops_matmul.cpp explains the relation of the public op, `_name` and `_name_autograd`.
#include <torch/csrc/stable/library.h>

#include "op_registration.h"
#include "ops/attention/api/attention.h"
#include "ops/attention/compose/softmax.h"

namespace {

using namespace torch_cubin;

STABLE_TORCH_LIBRARY_FRAGMENT(cubin, m) {
  m.def(
      "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, "
      "Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, *, float? scale=None, "
      "bool enable_gqa=False) -> Tensor");
  m.def(
      "_scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, "
      "Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, "
      "Tensor? dropout_seed=None, *, float? scale=None, bool enable_gqa=False) -> Tensor");

#define TC_ATTENTION                                                                      \
  "Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, "                   \
  "Tensor? dropout_seed=None, *, float? scale=None, bool enable_gqa=False, "              \
  "int window_left=-1, int window_right=-1, bool bottom_right=False, float softcap=0.0, " \
  "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? cu_seqlens_q=None, "            \
  "Tensor? cu_seqlens_k=None, int max_seqlen_q=0, int max_seqlen_k=0)"
#define TC_FORWARD \
  "(Tensor query, Tensor key, Tensor value, " TC_ATTENTION " -> (Tensor out, Tensor logsumexp)"
#define TC_BACKWARD                                                               \
  "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor " \
  "logsumexp, " TC_ATTENTION " -> (Tensor dq, Tensor dk, Tensor dv)"
  m.def("attention_forward" TC_FORWARD);
  m.def("_attention_forward" TC_FORWARD);
  m.def("_attention_forward_autograd" TC_FORWARD);
  m.def("attention_backward" TC_BACKWARD);
  m.def("_attention_backward" TC_BACKWARD);
  m.def("_attention_backward_autograd" TC_BACKWARD);
  m.def(
      "flash_attention(Tensor query, Tensor? key=None, Tensor? value=None, *, "
      "bool is_causal=False, float? scale=None, int window_left=-1, int window_right=-1, "
      "bool bottom_right=True, float softcap=0.0, Tensor? alibi_slopes=None, "
      "Tensor? sinks=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
      "int max_seqlen_q=0, int max_seqlen_k=0, float dropout_p=0.0, Tensor? q_descale=None, "
      "Tensor? k_descale=None, Tensor? v_descale=None) -> Tensor");
#define TC_FORWARD_E4M3                                                            \
  "(Tensor query, Tensor key, Tensor value, *, bool is_causal=False, "             \
  "float? scale=None, int window_left=-1, int window_right=-1, "                   \
  "bool bottom_right=False, Tensor? q_descale=None, Tensor? k_descale=None, "      \
  "Tensor? v_descale=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, " \
  "int max_seqlen_q=0, int max_seqlen_k=0) -> (Tensor out, Tensor logsumexp)"
  m.def("attention_forward_e4m3" TC_FORWARD_E4M3);
  m.def("_attention_forward_e4m3" TC_FORWARD_E4M3);
  m.def("_attention_forward_e4m3_autograd" TC_FORWARD_E4M3);

#define TC_KV_CACHE                                                                        \
  "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k=None, Tensor? v=None, "    \
  "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? cache_seqlens=None, "         \
  "Tensor? cache_batch_idx=None, Tensor? block_table=None, *, float? softmax_scale=None, " \
  "bool causal=False, int window_left=-1, int window_right=-1, float softcap=0.0, "        \
  "bool rotary_interleaved=True, Tensor? alibi_slopes=None, Tensor? sinks=None, "          \
  "Tensor? k_descale=None, Tensor? v_descale=None) -> Tensor"
  m.def("flash_attention_with_kvcache" TC_KV_CACHE);
  m.def("_flash_attention_with_kvcache" TC_KV_CACHE);
  m.def("_flash_attention_with_kvcache_autograd" TC_KV_CACHE);

  m.def(
      "_attention_softmax(Tensor scores, Tensor? attn_mask, Tensor? alibi_slopes, Tensor? sinks, "
      "float scale, float softcap, int first, int last, bool bottom_right) -> "
      "(Tensor probs, Tensor logsumexp)");
  m.def(
      "_attention_softmax_backward(Tensor grad, Tensor probs, Tensor? grad_logsumexp, "
      "Tensor? scores, float scale, float softcap) -> Tensor");
  m.def(
      "_attention_sinks_gradient(Tensor grad_out, Tensor out, Tensor logsumexp, Tensor sinks) -> "
      "Tensor");
  m.def("_attention_dropout(Tensor probs, Tensor seed, int drop_below) -> Tensor");
}

void implement_attention_ops(torch::stable::detail::StableLibrary& m) {
  TC_BY_GRAD_MODE("attention_forward", "query", "key", "value");
  TC_BY_GRAD_MODE("attention_forward_e4m3", "query", "key", "value");
  TC_BY_GRAD_MODE("attention_backward", "grad_out", "query", "key", "value", "out", "logsumexp");
  TC_BY_GRAD_MODE("flash_attention_with_kvcache", "q", "k_cache", "v_cache");
  m.impl("scaled_dot_product_attention", &scaled_dot_product_attention_composite);
  m.impl("flash_attention", TORCH_BOX(&flash_attention));
}

STABLE_TORCH_LIBRARY_IMPL(cubin, CompositeImplicitAutograd, m) { implement_attention_ops(m); }

// Without this registration torch.vmap would loop over the batch instead of decomposing the op.
STABLE_TORCH_LIBRARY_IMPL(cubin, FuncTorchBatchedDecomposition, m) { implement_attention_ops(m); }

// Dropout draws a random number, which must follow torch.vmap's randomness rules even if no
// argument is batched. Below this key one draw would serve the whole batch.
STABLE_TORCH_LIBRARY_IMPL(cubin, FuncTorchVmapMode, m) {
  m.impl("scaled_dot_product_attention", &scaled_dot_product_attention_composite);
  m.impl("flash_attention", TORCH_BOX(&flash_attention));
}

#define TC_RAW_ATTENTION_OPS(device)                                             \
  TC_RAW_AND_AUTOGRAD(attention_forward, device);                                \
  TC_RAW_AND_AUTOGRAD(attention_forward_e4m3, device);                           \
  TC_RAW_AND_AUTOGRAD(attention_backward, device);                               \
  TC_RAW_AND_AUTOGRAD(flash_attention_with_kvcache, device);                     \
  TC_RAW(scaled_dot_product_attention, device);                                  \
  m.impl("_attention_softmax", TORCH_BOX(&attention_softmax));                   \
  m.impl("_attention_softmax_backward", TORCH_BOX(&attention_softmax_backward)); \
  m.impl("_attention_dropout", TORCH_BOX(&attention_dropout))

STABLE_TORCH_LIBRARY_IMPL(cubin, CPU, m) { TC_RAW_ATTENTION_OPS(cpu); }
STABLE_TORCH_LIBRARY_IMPL(cubin, CUDA, m) {
  TC_RAW_ATTENTION_OPS(cuda);
  m.impl("_attention_sinks_gradient", TORCH_BOX(&attention_sinks_gradient_cuda));
}

}  // namespace
