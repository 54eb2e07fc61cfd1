// The schemas of the attention family's ops: which options each has, in which order.
#pragma once

#include "ops/attention/problem/kv_cache.h"
#include "ops/attention/problem/options.h"

namespace torch_cubin {

using AttentionSignature = Signature<AttentionOptions>;

constexpr int kMostArguments = 32;  // of an op, for its stack

const AttentionSignature& sdpa_signature();      // of the public op
const AttentionSignature& raw_sdpa_signature();  // with the seed of dropout
const AttentionSignature& forward_signature();
const AttentionSignature& backward_signature();
const AttentionSignature& e4m3_signature();
const AttentionSignature& flash_signature();
const Signature<KvCacheOptions>& kv_cache_signature();

}  // namespace torch_cubin
