// The random numbers for dropout of attention weights, as csrc/kernels/common/dropout.cuh defines
// them: a pure function of the seed and a weight's position (Philox 4x32, 7 rounds: Salmon et al.,
// SC 2011).
#pragma once

#include <cstdint>

namespace torch_cubin {

// One Philox call gives the numbers of 8 weights of a row, in columns 32 block + 8 word + 2 pair +
// half for word = 0..3 and half = 0..1: 16 bits each, the low half of a word first.
struct DropoutBits {
  uint32_t words[4];

  // head: batch * heads + head of the query.
  DropoutBits(uint64_t seed, int64_t head, int64_t row, int64_t block, int64_t pair) {
    uint32_t c0 = static_cast<uint32_t>(row);
    uint32_t c1 = static_cast<uint32_t>(block * 4 + pair);
    uint32_t c2 = static_cast<uint32_t>(head), c3 = 0;
    auto k0 = static_cast<uint32_t>(seed);
    auto k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 7; ++round) {
      const uint64_t p0 = uint64_t{c0} * 0xD2511F53u, p1 = uint64_t{c2} * 0xCD9E8D57u;
      const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
      const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
      c1 = static_cast<uint32_t>(p1);
      c3 = static_cast<uint32_t>(p0);
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

  int number(int word, int half) const {
    return static_cast<int>(half == 0 ? words[word] & 0xFFFF : words[word] >> 16);
  }
};

// The random number of the weight in row i and column j.
inline int dropout_bits(uint64_t seed, int64_t head, int64_t i, int64_t j) {
  return DropoutBits(seed, head, i, j / 32, j % 8 / 2).number(j % 32 / 8, j % 2);
}

}  // namespace torch_cubin
