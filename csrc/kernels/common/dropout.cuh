// The dropout mask of attention weights: a pure function of the seed and the weight's position, so
// that forward, backward and every tiling agree (Philox 4x32, 7 rounds: Salmon et al., SC 2011).
//
// One call serves the 8 weights of one row that a thread holds in 32 columns of m16n8 accumulator
// tiles: columns 32 c + 8 j + 2 t + e for j = 0..3 and e = 0..1. Weight (j, e) uses 16 bits of word
// j: the low half for e = 0, the high half for e = 1.
#pragma once

#include "ptx.cuh"

namespace torch_cubin {

struct DropoutBits {
  u32 words[4];

  // head: batch * heads + head of the query. column_32: column / 32. t: column % 8 / 2.
  TC_DEVICE DropoutBits(u64 seed, int head, int row, int column_32, int t) {
    u32 c0 = row, c1 = column_32 * 4 + t, c2 = head, c3 = 0;
    u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 7; ++round) {
      u64 p0 = static_cast<u64>(c0) * 0xD2511F53u, p1 = static_cast<u64>(c2) * 0xCD9E8D57u;
      u32 n0 = static_cast<u32>(p1 >> 32) ^ c1 ^ k0, n2 = static_cast<u32>(p0 >> 32) ^ c3 ^ k1;
      c1 = static_cast<u32>(p1);
      c3 = static_cast<u32>(p0);
      c0 = n0;
      c2 = n2;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
  }

  // Whether the weight in column 32 c + 8 j + 2 t + e is kept.
  TC_DEVICE bool kept(int j, int e, int drop_below) const {
    return static_cast<int>(e == 0 ? words[j] & 0xFFFF : words[j] >> 16) >= drop_below;
  }
};

}  // namespace torch_cubin
