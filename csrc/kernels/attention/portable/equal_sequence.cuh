// A block's sequence as far as no memory tells: for what a kernel does before the previous one has
// ended.
#pragma once

#include "tile.cuh"

namespace torch_cubin {

TC_DEVICE bool has_equal_lengths(const AttentionParams& p) {
  return p.cu_seqlens_q == nullptr && p.cu_seqlens_k == nullptr;
}

// The sequence, if all have equal lengths. Called by a whole warp.
TC_DEVICE Sequence equal_sequence(const AttentionParams& p, int batch, int head) {
  AttentionParams equal = p;
  equal.cu_seqlens_q = equal.cu_seqlens_k = nullptr;
  return Sequence(equal, batch, head);
}

}  // namespace torch_cubin
