// The random number of one attention weight, as csrc/kernels/common/dropout.cuh defines it.
#pragma once

#include <cstdint>

namespace torch_cubin {

// 16 bits for the weight of row i and column j; n is batch * heads + head of the query.
inline int dropout_bits(uint64_t seed, int64_t n, int64_t i, int64_t j) {
  uint32_t c0 = static_cast<uint32_t>(i);
  uint32_t c1 = static_cast<uint32_t>(j / 32 * 4 + j % 8 / 2);
  uint32_t c2 = static_cast<uint32_t>(n), c3 = 0;
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
  const uint32_t words[] = {c0, c1, c2, c3};
  const uint32_t word = words[j % 32 / 8];
  return static_cast<int>(j % 2 == 0 ? word & 0xFFFF : word >> 16);
}

}  // namespace torch_cubin
