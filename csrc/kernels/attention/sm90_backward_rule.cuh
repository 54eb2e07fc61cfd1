// What the `general` kernels of attention's backward on Hopper know of a step's scores: the rule from score to logit,
// and which weights dropout drops. A thread has keys `own` and 8 further, and of each 8 queries from `query` on two.
#pragma once

#include "common/dropout.cuh"
#include "sm90_backward_added.cuh"
#include "sm90_rule.cuh"

namespace torch_cubin {
namespace sm90 {

// ALiBi's, of a head of queries; 0 without it.
TC_DEVICE float slope_of(const Sm90BackwardParams& p, const KeyBlock& work, int head) {
  if (p.score.alibi_slopes == nullptr) return 0.0f;
  return __ldg(p.score.alibi_slopes + work.batch * p.score.alibi_stride + head);
}

// Calls function(i, kept) for each element i of this thread. One of DropoutBits' calls serves keys 2 t and 2 t + 1, which
// lanes 4 apart have: each lane makes those of one of two queries, and sends the other lane its halves.
template <class C, class Function>
TC_DEVICE void for_each_drop(const Sm90BackwardParams& p, const KeyBlock& work, int head, int query,
                             int own, Function&& function) {
  const u32 kLow = 0x5410, kHigh = 0x7632;  // halves of two words
  bool right = (own % 32 / 8 & 2) != 0, odd = own % 2 != 0;
  query += odd ? 1 : 0;
  u64 seed = *p.score.dropout_seed;
#pragma unroll
  for (int i = 0; i < C::kRows / 8; ++i) {
    DropoutBits bits(seed, work.batch * p.heads + head, query + 8 * i, own / 32, own % 8 / 2);
    u32 first = right ? bits.words[2] : bits.words[0],
        second = right ? bits.words[3] : bits.words[1];
    u32 mine = __byte_perm(first, second, odd ? kHigh : kLow);
    u32 theirs = __shfl_xor_sync(~0u, __byte_perm(first, second, odd ? kLow : kHigh), 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // query j % 2, key j / 2
      u32 both = (j % 2 != 0) == odd ? mine : theirs;
      int number = static_cast<int>(j / 2 != 0 ? both >> 16 : both & 0xFFFF);
      function(4 * i + j, number >= p.score.drop_below);
    }
  }
}

}  // namespace sm90
}  // namespace torch_cubin
