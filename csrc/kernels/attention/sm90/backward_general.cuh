// Options of `general` kernels, for the warpgroups of keys of both backward kernels on Hopper: a
// head's ALiBi slope, and the weights that dropout keeps. The rule from scores to logits is in
// sm90/rule.cuh.
#pragma once

#include "backward_added.cuh"
#include "common/dropout.cuh"
#include "rule.cuh"

namespace torch_cubin {
namespace sm90 {

// ALiBi's slope of a head of queries; 0 without it.
TC_DEVICE float slope_of(const Sm90BackwardParams& p, const KeyBlock& work, int head) {
  return has_alibi(p.score) ? __ldg(torch_cubin::slope_of(p.score, work.batch, head)) : 0.0f;
}

// The weights of a step that dropout keeps, a bit for each element of a thread, whose first is
// (query, own). One DropoutBits call serves keys 2 t and 2 t + 1, which are in lanes 4 apart: each
// lane computes the numbers of one of two queries, and sends the other lane its halves.
template <class C>
TC_DEVICE u64 kept_weights(const Sm90BackwardParams& p, const KeyBlock& work, int head, int query,
                           int own) {
  const u32 kLow = 0x5410, kHigh = 0x7632;  // halves of two words
  bool right = (own % 32 / 8 & 2) != 0, odd = own % 2 != 0;
  int made = query + (odd ? 1 : 0);
  u64 seed = *p.score.dropout_seed, kept = 0;
#pragma unroll
  for (int i = 0; i < C::kRows / 8; ++i) {
    DropoutBits bits(seed, work.batch * p.heads + head, made + 8 * i, own / 32, own % 8 / 2);
    u32 first = right ? bits.words[2] : bits.words[0];
    u32 second = right ? bits.words[3] : bits.words[1];
    u32 mine = __byte_perm(first, second, odd ? kHigh : kLow);
    u32 theirs = __shfl_xor_sync(~0u, __byte_perm(first, second, odd ? kLow : kHigh), 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // query j % 2, key j / 2
      u32 both = (j % 2 != 0) == odd ? mine : theirs;
      int number = static_cast<int>(j / 2 != 0 ? both >> 16 : both & 0xFFFF);
      kept |= number >= p.score.drop_below ? u64(1) << (4 * i + j) : 0;
    }
  }
  return kept;
}

}  // namespace sm90
}  // namespace torch_cubin
