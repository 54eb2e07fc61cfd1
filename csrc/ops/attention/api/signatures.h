// The schemas of the attention family's ops: the options of each, in order.
#pragma once

#include "ops/attention/problem/kv_cache.h"
#include "ops/attention/problem/options.h"

namespace torch_cubin {

using AttentionSignature = Signature<AttentionOptions>;

constexpr int kMostArguments = 32;  // of one op, for its stack

const AttentionSignature& sdpa_signature();      // of the public op
const AttentionSignature& raw_sdpa_signature();  // with the dropout seed
const AttentionSignature& forward_signature();
const AttentionSignature& backward_signature();
const AttentionSignature& e4m3_signature();
const AttentionSignature& e4m3_backward_signature();
const AttentionSignature& flash_signature();
const AttentionSignature& softmax_signature();  // of the private ops of composed attention
const AttentionSignature& softmax_backward_signature();
const AttentionSignature& dropout_signature();
const Signature<KvCacheOptions>& kv_cache_signature();

}  // namespace torch_cubin
