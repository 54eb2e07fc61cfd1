// The class of a tile of queries for four blocks of keys, for both kernels that convert masks for
// the forward on Hopper (sm90/mask.cu, sm90/added_mask.cu).
#pragma once

#include "common/ptx.cuh"
#include "forward_params.h"

namespace torch_cubin {
namespace sm90 {

// Called by one thread of the block that has chunk `chunk` of `line`'s blocks of keys, after all of
// its threads have contributed. `found`: two bits for each block of keys. Bit 0: some key is
// visible. Bit 1: some key is hidden, or gets a nonzero addend.
template <class Params>
TC_DEVICE void store_classes(const Params& p, tc_int64 line, int chunk, u32 found) {
  // A block without a visible key has class 0 regardless of bit 1.
  u32 some = found & 0x55;  // bit 0 of each class
  unsigned char* classes = p.classes + line * p.classes_of_tile;
  classes[chunk] = static_cast<unsigned char>(some | (found & some << 1));
  if (chunk != p.chunks - 1) return;
  for (int i = p.chunks; i < p.classes_of_tile; ++i) classes[i] = 0;  // words are read whole
}

}  // namespace sm90
}  // namespace torch_cubin
