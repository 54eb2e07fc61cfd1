// The order of the batches of a mask in attention's forward on Hopper: those of which it leaves
// more keys come first, so that short tiles end the kernel (padding 0.985 of the time, H200).
#pragma once

#include "sequence.cuh"

namespace torch_cubin {
namespace sm90 {

// A bit for each block of keys in a word of Sm90MaskClass that is not entirely hidden: bit 0 of its
// class.
TC_DEVICE u32 visible_blocks(u32 word) { return word & 0x55555555u; }

// The words of a line of Sm90MaskClass.
template <int kTileN>
TC_DEVICE int mask_class_words(const Sm90Lengths& p) {
  constexpr int kWordKeys = kTileN * kMaskWordBlocks;
  return (p.seqlen_k + kWordKeys - 1) / kWordKeys;
}

// In a whole warp, the same in every block.
class BatchOrder {
 public:
  // The batch in the place of `batch`. Only the last 32 change places, and none of those whose
  // tiles `blocks` blocks take first, while the order is not known.
  template <int kTileN>
  TC_DEVICE int in_place(const Sm90AttentionParams& p, int blocks, int batch) {
    int taken = ((blocks - 1) / (p.schedule * p.tiles) + 1) * p.schedule;  // heads
    int first = max((taken + p.heads - 1) / p.heads, p.batch - 32);
    if (batch < first || p.mask.class_stride[0] == 0) return batch;
    if (own_ < 0) sort<kTileN>(p, first);
    return __shfl_sync(~0u, own_, batch - first);
  }

 private:
  // Sorts batches from `first` on, judged by a tile in the middle of each: a bitonic sort of the
  // lanes, largest first.
  template <int kTileN>
  TC_DEVICE void sort(const Sm90AttentionParams& p, int first) {
    constexpr int kMostWords = 16;
    int lane = threadIdx.x % 32, batch = first + lane, seen = 0;
    if (batch < p.batch) {
      const u32* classes =
          p.mask.classes + batch * p.mask.class_stride[0] + p.tiles / 2 * p.mask.class_stride[2];
      int words = min(mask_class_words<kTileN>(p.lengths), kMostWords);
      seen = 1;
#pragma unroll 1
      for (int i = 0; i < words; ++i) seen += __popc(visible_blocks(__ldg(classes + i)));
    }
    int key = seen * 32 + 31 - lane;  // equal ones stay in order
#pragma unroll 1
    for (int size = 2; size <= 32; size *= 2) {
#pragma unroll 1
      for (int step = size / 2; step > 0; step /= 2) {
        int other = __shfl_xor_sync(~0u, key, step);
        bool larger = ((lane & step) == 0) == ((lane & size) == 0);
        key = larger ? max(key, other) : min(key, other);
      }
    }
    own_ = first + 31 - key % 32;
  }

  int own_ = -1;  // a lane's batch, if they are sorted
};

}  // namespace sm90
}  // namespace torch_cubin
