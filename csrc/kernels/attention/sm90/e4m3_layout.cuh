// How sm90/e4m3_values.cu lays out values for sm90/e4m3.cu.
#pragma once

#include "common/ptx.cuh"

namespace torch_cubin {
namespace sm90 {

// The key at a place among 16. Thread t of a quad has the weights of keys 2t, 2t + 1, 2t + 8 and
// 2t + 9 as the scores' product leaves them, and the next product asks it for places 4t to 4t + 3.
constexpr TC_DEVICE int e4m3_key(int place) {
  return place / 2 % 2 * 8 + place / 4 * 2 + place % 2;
}

// Where the keys of packed sequence number `sequence` begin, whose first row is `row`: at least as
// far from those of the one before as that has keys, up to a multiple of `granule`.
TC_DEVICE int values_place(int row, int sequence, int granule) {
  return ((row + granule - 1) / granule + sequence) * granule;
}

}  // namespace sm90
}  // namespace torch_cubin
