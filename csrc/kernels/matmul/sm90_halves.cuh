// Tiles of sm90.cu and sm90_ping_pong.cu whose columns are no whole panels of 64, where B is not
// contiguous along K: 160 and 96. Every second one begins in the middle of a line of the L2 cache.
// Its panels would all lie across two lines a row, for each of which the TMA takes 1.7 cycles. So
// it is loaded in another order: first the whole panels, which begin with lines, then its first 32
// columns. Its sums are brought into order before they are stored. (H200: blocks alone of TN
// 128x160 1.03 of the speed, up to 1.18, of NN 1.07; in clusters as before; of NN 192x160 0.99.)
#pragma once

#include "sm90_tiles.cuh"

namespace torch_cubin {
namespace sm90 {

constexpr int kHalf = 32;  // columns

template <class C>
constexpr bool kHasHalves = C::kBMnMajor && C::kElement == 2 && C::kTileN % 64 == kHalf &&
                            C::kTileN > 64 && !C::kReads && (C::kAMnMajor || C::kTileM == 128);

// Whether a tile's first columns are the second half of a line.
template <class C>
TC_DEVICE bool begins_with_half(int n0) {
  return kHasHalves<C> && n0 % 64 == kHalf;
}

// Where the whole panels of a tile begin, one after the other, and where its last one does, of
// which the first half is multiplied.
struct Panels {
  int whole, half;
};

template <class C>
TC_DEVICE Panels panels_of(int n0) {
  if (begins_with_half<C>(n0)) return {n0 + kHalf, n0};
  return {n0, n0 + C::kTileN - kHalf};
}

// Calls load(to, column) for each panel of a tile of B.
template <class C, class Load>
TC_DEVICE void load_panels(u32 to, const Panels& panels, Load load) {
  constexpr int kWhole = C::kTileN / 64;
#pragma unroll
  for (int panel = 0; panel < kWhole; ++panel) {
    load(to + panel * (C::kTileK * 128), panels.whole + 64 * panel);
  }
  load(to + kWhole * (C::kTileK * 128), panels.half);
}

// load_operand() of B.
template <class C>
TC_DEVICE void load_b(const Sm90TensorMap& map, u32 to, u32 full, const Share& share, bool batched,
                      int n0, int k, const Work& w) {
  if constexpr (kHasHalves<C>) {
    const int skipped = share.part * (C::kTileK >> share.log_parts);
    load_panels<C>(to + skipped * 128, panels_of<C>(n0), [&](u32 box, int column) {
      load_box(map, box, full, share, batched, column, k + skipped, w);
    });
  } else {
    load_operand<C::kBMnMajor, C::kTileN, C::kTileK>(map, to, full, share, batched, n0, k, w);
  }
}

// Brings the sums of a tile that begins with half a panel into the order of its columns.
template <class C>
TC_DEVICE void order_columns(float (&sum)[C::kBlocksM][C::kTileN / 2], int n0) {
  if constexpr (kHasHalves<C>) {
    if (!begins_with_half<C>(n0)) return;
    constexpr int kOfHalf = kHalf / 2, kWhole = C::kTileN / 2 - kOfHalf;
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
      float half[kOfHalf];
#pragma unroll
      for (int j = 0; j < kOfHalf; ++j) half[j] = sum[i][kWhole + j];
#pragma unroll
      for (int j = kWhole - 1; j >= 0; --j) sum[i][j + kOfHalf] = sum[i][j];
#pragma unroll
      for (int j = 0; j < kOfHalf; ++j) sum[i][j] = half[j];
    }
  }
}

}  // namespace sm90
}  // namespace torch_cubin
