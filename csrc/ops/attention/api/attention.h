// The attention family's entry points, as ops_attention.cpp registers them.
//
// Each allocates fresh outputs whose dims have the order of query's in memory (output_strides in
// problem/arguments.h). The CPU ones are references made of ATen (reference.cpp). The public ops
// forward to these from csrc/ops_attention.cpp, scaled_dot_product_attention and flash_attention
// through composite.cpp.
#pragma once

#include <cstdint>
#include <tuple>

#include "ops/attention/problem/arguments.h"
#include "ops/attention/problem/kv_cache.h"

namespace torch_cubin {

// out and logsumexp. The logsumexp is undefined if it is not wanted, except on the CPU, where it is
// always returned.
std::tuple<Tensor, Tensor> attention_forward_cpu(AttentionArguments arguments, bool want_logsumexp);
std::tuple<Tensor, Tensor> attention_forward_cuda(AttentionArguments arguments,
                                                  bool want_logsumexp);

std::tuple<Tensor, Tensor, Tensor> attention_backward_cpu(AttentionArguments arguments,
                                                          const Tensor& grad_out, const Tensor& out,
                                                          const Tensor& logsumexp);
std::tuple<Tensor, Tensor, Tensor> attention_backward_cuda(AttentionArguments arguments,
                                                           const Tensor& grad_out,
                                                           const Tensor& out,
                                                           const Tensor& logsumexp);

Tensor flash_attention_with_kvcache_cpu(KvCacheArguments arguments);
Tensor flash_attention_with_kvcache_cuda(KvCacheArguments arguments);

// float32 [heads]: minus the sum over rows of exp(sinks - logsumexp) * sum(grad_out * out), for
// float16, bfloat16 or float32 tensors of [batch, heads, rows, head_dim]. Throws [no_kernel] if the
// catalog has no kernel for it.
Tensor attention_sinks_gradient_cuda(const Tensor& grad_out, const Tensor& out,
                                     const Tensor& logsumexp, const Tensor& sinks);

// The boxed kernels of public ops that do more than choose an op by the grad mode.
void scaled_dot_product_attention_composite(StableIValue* stack, uint64_t, uint64_t);
// The same attention for other layouts. Throws [input] if a rank or the packing is wrong;
// attention_forward checks the rest.
void flash_attention_composite(StableIValue* stack, uint64_t, uint64_t);

}  // namespace torch_cubin
