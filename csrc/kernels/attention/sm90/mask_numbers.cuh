// Tests on the numbers of additive masks, read as bits, for the kernels that convert these on
// Hopper (sm90/added_mask.cu, sm90/backward_added_mask.cu).
#pragma once

#include "common/ptx.cuh"
#include "forward_params.h"

namespace torch_cubin {
namespace sm90 {

// Two keys' numbers in one word.
struct Halves {
  using Number = u16;
  using Pair = u32;
  static TC_DEVICE Pair join(Number left, Number right) { return left | u32(right) << 16; }
  static TC_DEVICE u32 of(Pair pair, int i) { return i == 0 ? pair & 0xffff : pair >> 16; }
  static constexpr u32 kMagnitude = 0x7fff;
};
struct Floats {
  using Number = u32;
  using Pair = u64;
  static TC_DEVICE Pair join(Number left, Number right) { return left | u64(right) << 32; }
  static TC_DEVICE u32 of(Pair pair, int i) { return static_cast<u32>(pair >> 32 * i); }
  static constexpr u32 kMagnitude = 0x7fffffff;
};

// The bits of a Sm90MaskClass: 1 if a number is not -inf, 2 if it is not 0. A negative 0 adds
// nothing either.
template <class Type>
TC_DEVICE u32 class_of(typename Type::Pair pair, u32 minus_infinity) {
  u32 found = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 bits = Type::of(pair, i);
    found |= (bits != minus_infinity ? 1u : 0u) | ((bits & Type::kMagnitude) != 0 ? 2u : 0u);
  }
  return found;
}

template <class Type>
TC_DEVICE u32 class_of(uint4 vector, u32 minus_infinity) {
  using Pair = typename Type::Pair;
  constexpr int kPairs = 16 / sizeof(Pair);
  Pair pair[kPairs];
  *reinterpret_cast<uint4*>(pair) = vector;
  u32 found = 0;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) found |= class_of<Type>(pair[i], minus_infinity);
  return found;
}

}  // namespace sm90
}  // namespace torch_cubin
