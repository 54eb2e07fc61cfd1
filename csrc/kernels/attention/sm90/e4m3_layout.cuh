// The layout that sm90/e4m3_values.cu gives values for sm90/e4m3.cu.
#pragma once

#include "common/ptx.cuh"

namespace torch_cubin {
namespace sm90 {

// The key at an index among 16. Thread t of a quad has the weights of keys 2t, 2t + 1, 2t + 8 and
// 2t + 9 after the scores' product, and provides indices 4t to 4t + 3 to the next product.
constexpr TC_DEVICE int e4m3_key(int place) {
  return place / 2 % 2 * 8 + place / 4 * 2 + place % 2;
}

// The first key index of packed sequence number `sequence`, whose first row is `row`: at least as
// far from the previous sequence's as that has keys, rounded up to a multiple of `granule`.
TC_DEVICE int values_place(int row, int sequence, int granule) {
  return ((row + granule - 1) / granule + sequence) * granule;
}

}  // namespace sm90
}  // namespace torch_cubin
