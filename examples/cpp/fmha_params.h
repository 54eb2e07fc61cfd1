// The one parameter of the kernel fmha_packed, by value: shared by device and host code.
#pragma once

#include <cstdint>

struct FmhaParams {
  const void* qkv;     // fp16, (batch, seqlen, 3, heads, 64): queries, keys and values packed
  void* out;           // fp16, (batch, seqlen, heads, 64)
  int64_t row_stride;  // elements from one position of qkv to the next: 3 * heads * 64
  int32_t batch, seqlen, heads;
  float scale;
  bool is_causal;
};
