// The attention family's entry points, as ops_attention.cpp registers them.
//
// Each allocates fresh outputs whose dims lie in memory in the order of query's (output_strides in
// problem/checks.h). The CPU ones are references made of ATen (reference.cpp). The public ops
// forward to these from csrc/ops_attention.cpp, scaled_dot_product_attention through composite.cpp
// and flash_attention through flash_attention.cpp.
#pragma once

#include <cstdint>
#include <tuple>

#include "ops/attention/problem/kv_cache.h"
#include "ops/attention/problem/options.h"

namespace torch_cubin {

// out and logsumexp, which is undefined where it is not wanted; on the CPU it is always there.
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

// float32 [heads]: minus the sum over rows of exp(sinks - logsumexp) * sum(grad_out * out), of
// float16, bfloat16 or float32 [batch, heads, rows, head_dim]. Throws [no_kernel] where the catalog
// has none.
Tensor attention_sinks_gradient_cuda(const Tensor& grad_out, const Tensor& out,
                                     const Tensor& logsumexp, const Tensor& sinks);

// The public ops that do more than to forward by the grad mode, boxed.
void scaled_dot_product_attention_composite(StableIValue* stack, uint64_t, uint64_t);
// Other layouts of the same attention. Throws [input] where a rank or the packing is wrong;
// attention_forward checks the rest.
void flash_attention_composite(StableIValue* stack, uint64_t, uint64_t);

// call_op() of cubin::_attention_forward, of _attention_forward_e4m3 or of the variant of either
// with a derivative for another public op, the `caller`: errors name that one.
void call_attention_forward(const char* op, const char* caller, StableIValue* stack);

}  // namespace torch_cubin
