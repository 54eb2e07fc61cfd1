// Which block computes a tile: the one with the least work so far. Held by one whole warp.
#pragma once

#include "common/ptx.cuh"

namespace torch_cubin {
namespace sm90 {

// The work that each block has been given, in units of `kUnit`; a block's number takes the low
// bits, so that no two are equal, and of equal work the first block's is the least. The host limits
// work to 31 bits (sm90_tile_schedule).
class BlockLoads {
 public:
  static constexpr int kMost = 160;  // blocks
  static constexpr unsigned kUnit = 256;

  // `cost(b)`: of the first tile of block b.
  template <class Cost>
  TC_DEVICE void start(int blocks, int own, Cost&& cost) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      int block = threadIdx.x % 32 + 32 * i;
      loads_[i] = block < blocks ? block + cost(block) : kNever;
    }
    own_ = own + cost(own);
  }

  // Gives tiles of equal cost in order, each to the block with the least work then: as many of
  // `tiles` as there are blocks with equally little. Returns how many; `mine`: which of them is
  // this block's, or negative. One by one each took 315 cycles in every block, for all of them more
  // than the work on tiles of 4,096 causal rows.
  TC_DEVICE int give(int tiles, unsigned cost, int& mine) {
    unsigned begin = least(), end = (begin | (kUnit - 1)) + 1;
    // If they are too many, the first ones. To choose among more blocks, with up to `cost` more
    // work, takes more steps of this search than it saves calls.
    int count = count_below(end);
    while (count > tiles) {
      unsigned middle = begin + (end - begin) / 2;
      int below = count_below(middle);
      if (below < tiles) {
        begin = middle;
      } else {
        end = middle;
        count = below;
      }
    }
    mine = count_below(own_);  // outside of the condition: see uniform() in common/uniform.cuh
    if (own_ < end) {
      own_ += cost;
    } else {
      mine = -1;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) loads_[i] += loads_[i] < end ? cost : 0;
    return count;
  }

 private:
  static constexpr int kLoads = kMost / 32;  // of a lane: of every 32nd block
  static constexpr unsigned kNever = ~0u >> 1;

  TC_DEVICE unsigned least() const {
    unsigned least = loads_[0];
#pragma unroll
    for (int i = 1; i < kLoads; ++i) least = min(least, loads_[i]);
    return __reduce_min_sync(~0u, least);
  }

  TC_DEVICE int count_below(unsigned limit) const {
    unsigned count = 0;  // of differences' signs: comparisons would be added one after the other
#pragma unroll
    for (int i = 0; i < kLoads; ++i) count += (loads_[i] - limit) >> 31;
    return __reduce_add_sync(~0u, count);
  }

  unsigned loads_[kLoads];
  unsigned own_;  // the same in all lanes
};

}  // namespace sm90
}  // namespace torch_cubin
