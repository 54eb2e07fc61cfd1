// The arguments of an attention op, checked and in every form that its device's code needs.
#pragma once

#include "ops/attention/attention.h"
#include "ops/attention/checks.h"

namespace torch_cubin {

inline AttentionOptions options_of(TC_ATTENTION_ARGUMENTS) {
  AttentionOptions options;
  options.attn_mask = attn_mask;
  options.dropout_p = dropout_p;
  options.is_causal = is_causal;
  options.dropout_seed = dropout_seed;
  options.scale = scale;
  options.enable_gqa = enable_gqa;
  options.window_left = window_left;
  options.window_right = window_right;
  options.bottom_right = bottom_right;
  options.softcap = softcap;
  options.alibi_slopes = alibi_slopes;
  options.sinks = sinks;
  options.cu_seqlens_q = cu_seqlens_q;
  options.cu_seqlens_k = cu_seqlens_k;
  options.max_seqlen_q = max_seqlen_q;
  options.max_seqlen_k = max_seqlen_k;
  return options;
}

#define TC_ATTENTION_OPTIONS                                                                       \
  options_of(attn_mask, dropout_p, is_causal, dropout_seed, scale, enable_gqa, window_left,        \
             window_right, bottom_right, softcap, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, \
             max_seqlen_q, max_seqlen_k)

}  // namespace torch_cubin
