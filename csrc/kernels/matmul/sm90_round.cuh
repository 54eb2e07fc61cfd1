// The loop over K of one warpgroup that multiplies alone, unrolled by the ring of stages. It has to
// issue the next products within the 64 cycles (of 128 columns) that its last one takes, or the
// tensor cores wait: a loop that computes addresses takes longer than that, 66 cycles of each k
// block of 64 x 128 (H200).
#pragma once

#include "common/uniform.cuh"
#include "sm90_block.cuh"

namespace torch_cubin {
namespace sm90 {

// Multiplies the k blocks of all stages. begun: these are not the tile's first ones. Frees each
// stage once the next one is being multiplied, at the barrier `freed` of stage 0.
template <class C>
TC_DEVICE void multiply_round(float (&sum)[C::kBlocksM][C::kTileN / 2], u64 a0, bool begun,
                              u32 full, u32 phase, bool frees, u32 freed) {
  constexpr u64 kHigh = u64{0xffffffff} << 32;
  constexpr int kStep = C::kStageBytes >> 4;
  const u32 a_low = uniform(static_cast<u32>(a0));
  unrolled<C::kStages>([&](auto constant) {
    constexpr int s = decltype(constant)::value;
    const u32 low = a_low + s * kStep;
    barrier_wait(full + 8 * s, phase);
    multiply<C>(sum, (a0 & kHigh) | low, (a0 & kHigh) | (low + (C::kABytes >> 4)),
                s == 0 ? begun : 1);
    wgmma_wait<1>();
    if (frees && (s > 0 || begun)) {
      barrier_arrive_remote(freed + 8 * (s == 0 ? C::kStages - 1 : s - 1));
    }
  });
}

}  // namespace sm90
}  // namespace torch_cubin
