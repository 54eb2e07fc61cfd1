// One stage of a product on Hopper: loads of the operands' tiles to shared memory by the TMA, and
// their multiplication by wgmma. sm90.cu and sm90_symmetric.cu schedule the stages.
#pragma once

#include "common/wgmma.cuh"
#include "sm90_schedule.cuh"

namespace torch_cubin {
namespace sm90 {

// The part of an operand's tile that a block loads: one of 2^log_parts equal parts, for all blocks
// in `mask`.
struct Share {
  int log_parts, part;
  u16 mask;
};

TC_DEVICE void load_box(const Sm90TensorMap& map, u32 to, u32 full, const Share& share,
                        bool batched, int x, int y, const Work& w) {
  if (share.log_parts != 0) {
    if (batched) {
      tma_multicast(to, &map, full, share.mask, x, y, w.b0, w.b1, w.b2);
    } else {
      tma_multicast(to, &map, full, share.mask, x, y);
    }
  } else if (batched) {
    tma_load(to, &map, full, x, y, w.b0, w.b1, w.b2);
  } else {
    tma_load(to, &map, full, x, y);
  }
}

// Loads one operand's tile, or this block's part of it.
template <bool kMnMajor, int kRows, int kTileK>
TC_DEVICE void load_operand(const Sm90TensorMap& map, u32 to, u32 full, const Share& share,
                            bool batched, int mn, int k, const Work& w) {
  if constexpr (kMnMajor) {
    int skipped = share.part * (kTileK >> share.log_parts);
#pragma unroll
    for (int panel = 0; panel < (kRows + kTileK - 1) / kTileK; ++panel) {
      load_box(map, to + panel * (kTileK * 128) + skipped * 128, full, share, batched,
               mn + kTileK * panel, k + skipped, w);
    }
  } else {
    int skipped = share.part * (kRows >> share.log_parts);
    load_box(map, to + skipped * 128, full, share, batched, k, mn + skipped, w);
  }
}

// What wgmma multiplies: of float32, TF32.
template <class C>
constexpr WgmmaType kWgmmaType = C::kType == DType::bfloat16  ? WgmmaType::bf16
                                 : C::kType == DType::float16 ? WgmmaType::f16
                                                              : WgmmaType::tf32;

// Issues the products of one stage and does not wait for them. `a` and `b` describe the stage's
// tiles.
template <class C>
TC_DEVICE void multiply(float (&sum)[C::kBlocksM][C::kTileN / 2], u64 a, u64 b, int add) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
      Wgmma<C::kTileN>::template run<kWgmmaType<C>, C::kAMnMajor, C::kBMnMajor>(
          sum[i], advance(a, i * 8192 + k * (C::kAMnMajor ? kMnMajorStep : 32)),
          advance(b, k * (C::kBMnMajor ? kMnMajorStep : 32)), k == 0 ? add : 1);
    }
  }
  wgmma_commit();
}

}  // namespace sm90
}  // namespace torch_cubin
