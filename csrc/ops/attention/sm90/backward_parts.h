// How many work items share a tile of keys in the backward for Hopper
// (kernels/attention/sm90/backward_parts.cuh), and how many tiles of keys a sum of dq
// (kernels/attention/sm90/backward_dq.cuh).
#pragma once

#include "kernels/attention/sm90/forward_params.h"
#include "ops/attention/plan/backend.h"

namespace torch_cubin {

// `heads`: of keys, in all sequences; 0: one part. `slots`: work items that run at a time.
struct Sm90KeyWork {
  int64_t heads, group, slots;
  int64_t seqlen_q, seqlen_k;    // of a sequence, the average if they are packed
  int64_t longest_q, longest_k;  // of the longest sequence
  int64_t first, last;           // the band, see Sm90Lengths
};

struct Sm90KeyShares {
  int64_t parts = 1;  // of a tile of keys
  int64_t sets = 1;   // of the tiles of keys
};

// The heads of keys whose blocks run concurrently, of `kv_heads` in all sequences.
int64_t sm90_heads_together(const AttentionCase& problem, const AttentionRow& row, int64_t kv_heads,
                            int64_t parts, bool has_band, const Device& device);

// The numbers that take the least time. One part is enough if all multiprocessors are busy with it.
Sm90KeyShares sm90_key_shares(const Sm90KeyWork& work, const AttentionRow& row,
                              const Device& device);

}  // namespace torch_cubin
