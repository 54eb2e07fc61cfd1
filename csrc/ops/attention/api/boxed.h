// The raw ops of the attention family as boxed kernels: they unbox their arguments by the
// signatures and call the entry points of either device.
#pragma once

#include <utility>

#include "ops/attention/api/attention.h"
#include "ops/attention/api/signatures.h"
#include "ops/attention/compose/softmax.h"

namespace torch_cubin {

// For the references (kReference), each tensor is checked to have memory: they call ops of ATen,
// some of which crash without it. The functions that launch kernels check what they read.
template <bool kReference>
AttentionArguments take_attention(const char* op, const AttentionSignature& signature,
                                  const StableIValue* stack) {
  using torch::stable::detail::to;
  AttentionOptions options = signature.take(stack);
  AttentionArguments arguments = {op, to<Tensor>(stack[0]), to<Tensor>(stack[1]),
                                  to<Tensor>(stack[2]), std::move(options)};
  if constexpr (kReference) {
    signature.require_memory(op, arguments.options,
                             {&arguments.query, &arguments.key, &arguments.value});
  }
  return arguments;
}

template <auto* kForward, bool kReference>
void boxed_sdpa(StableIValue* stack, uint64_t, uint64_t) {
  AttentionArguments arguments =
      take_attention<kReference>("scaled_dot_product_attention", raw_sdpa_signature(), stack);
  stack[0] = torch::stable::detail::from(std::get<0>(kForward(std::move(arguments), false)));
}

template <auto* kForward, bool kReference>
void boxed_forward(StableIValue* stack, uint64_t, uint64_t) {
  const auto [out, logsumexp] =
      kForward(take_attention<kReference>("attention_forward", forward_signature(), stack), true);
  stack[0] = torch::stable::detail::from(out);
  stack[1] = torch::stable::detail::from(logsumexp);
}

// The same op for float8_e4m3fn, under its own name and schema.
template <auto* kForward, bool kReference>
void boxed_forward_e4m3(StableIValue* stack, uint64_t, uint64_t) {
  AttentionArguments arguments =
      take_attention<kReference>("attention_forward_e4m3", e4m3_signature(), stack);
  arguments.options.e4m3 = arguments.options.enable_gqa = true;
  const auto [out, logsumexp] = kForward(std::move(arguments), true);
  stack[0] = torch::stable::detail::from(out);
  stack[1] = torch::stable::detail::from(logsumexp);
}

template <auto* kBackward, bool kReference>
void run_backward(const char* op, const AttentionSignature& signature, bool e4m3,
                  StableIValue* stack) {
  using torch::stable::detail::to;
  AttentionOptions options = signature.take(stack);
  if (e4m3) options.e4m3 = options.enable_gqa = true;
  const auto grad_out = to<Tensor>(stack[0]);
  AttentionArguments arguments = {op, to<Tensor>(stack[1]), to<Tensor>(stack[2]),
                                  to<Tensor>(stack[3]), std::move(options)};
  const auto out = to<Tensor>(stack[4]), logsumexp = to<Tensor>(stack[5]);
  if constexpr (kReference) {
    signature.require_memory(
        op, arguments.options,
        {&grad_out, &arguments.query, &arguments.key, &arguments.value, &out, &logsumexp});
  }
  const auto [dq, dk, dv] = kBackward(std::move(arguments), grad_out, out, logsumexp);
  stack[0] = torch::stable::detail::from(dq);
  stack[1] = torch::stable::detail::from(dk);
  stack[2] = torch::stable::detail::from(dv);
}

template <auto* kBackward, bool kReference>
void boxed_backward(StableIValue* stack, uint64_t, uint64_t) {
  run_backward<kBackward, kReference>("attention_backward", backward_signature(), false, stack);
}

template <auto* kBackward, bool kReference>
void boxed_backward_e4m3(StableIValue* stack, uint64_t, uint64_t) {
  run_backward<kBackward, kReference>("attention_backward_e4m3", e4m3_backward_signature(), true,
                                      stack);
}

// The private ops of composed attention (compose/softmax.h), on either device.
inline void boxed_softmax(StableIValue* stack, uint64_t, uint64_t) {
  using torch::stable::detail::to;
  const AttentionOptions options = softmax_signature().take(stack);
  const auto [probs, logsumexp] = attention_softmax(to<Tensor>(stack[0]), options);
  stack[0] = torch::stable::detail::from(probs);
  stack[1] = torch::stable::detail::from(logsumexp);
}

inline void boxed_softmax_backward(StableIValue* stack, uint64_t, uint64_t) {
  using torch::stable::detail::to;
  const AttentionOptions options = softmax_backward_signature().take(stack);
  const auto grad = to<Tensor>(stack[0]), probs = to<Tensor>(stack[1]);
  const auto grad_logsumexp = to<OptionalTensor>(stack[2]), scores = to<OptionalTensor>(stack[3]);
  stack[0] = torch::stable::detail::from(
      attention_softmax_backward(grad, probs, grad_logsumexp, scores, options));
}

inline void boxed_dropout(StableIValue* stack, uint64_t, uint64_t) {
  const AttentionOptions options = dropout_signature().take(stack);
  const auto probs = torch::stable::detail::to<Tensor>(stack[0]);
  stack[0] = torch::stable::detail::from(attention_dropout(probs, options));
}

template <auto* kAttend, bool kReference>
void boxed_kv_cache(StableIValue* stack, uint64_t, uint64_t) {
  using torch::stable::detail::to;
  KvCacheOptions options = kv_cache_signature().take(stack);
  KvCacheArguments arguments = {std::move(options), to<Tensor>(stack[0]), to<Tensor>(stack[1]),
                                to<Tensor>(stack[2])};
  if constexpr (kReference) {
    kv_cache_signature().require_memory("flash_attention_with_kvcache", arguments,
                                        {&arguments.q, &arguments.k_cache, &arguments.v_cache});
  }
  stack[0] = torch::stable::detail::from(kAttend(std::move(arguments)));
}

}  // namespace torch_cubin
