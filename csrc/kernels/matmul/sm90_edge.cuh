// Loads of tiles that reach beyond their matrix, for sm90.cu and sm90_ping_pong.cu. Where an
// operand is not contiguous along K, the TMA fills boxes outside of it with zeros at about 25 bytes
// a cycle, less than half of the rate at which it loads, and the blocks of a cluster wait for one
// another. Boxes of weight gradients (TN) that lie outside as a whole are not loaded: what the
// stage held before is multiplied, and nothing of that is stored. (H200: 960 x 576 x 16384 50.6 ->
// 35.2 us, 1920 x 640 x 16384 in pairs along M 75.7 -> 63.2; of NN, 1024 x 904 x 4096 1%, of NT
// nothing.) Tiles of others that lie outside as a whole, as those of clusters may, are loaded from
// elsewhere.
#pragma once

#include "sm90_halves.cuh"

namespace torch_cubin {
namespace sm90 {

// Weight gradients: neither operand is contiguous along K. The largest tiles leave no registers for
// it, as for sums of rows; of the smallest one, a box each of A and B, no box is outside.
template <class C>
constexpr bool kHasEdges = C::kRowSums && C::kBMnMajor && C::kTileN > C::kTileK;

// An operand's tile of kRows rows is loaded in boxes of kTileK rows. The number of boxes that are
// not outside the matrix as a whole, where it has `rows` rows from the tile's first on.
template <class C, int kRows>
TC_DEVICE int boxes_inside(int rows) {
  constexpr int kBoxes = (kRows + C::kTileK - 1) / C::kTileK;
  return max(0, min(kBoxes, (rows + C::kTileK - 1) / C::kTileK));
}

// Whether a box of either operand's tile is outside the matrix as a whole.
template <class C>
TC_DEVICE bool is_at_edge(const Sm90MatmulParams& p, const Work& w) {
  constexpr int kLastOfA = (C::kTileM - 1) / C::kTileK * C::kTileK;
  constexpr int kLastOfB = (C::kTileN - 1) / C::kTileK * C::kTileK;
  return p.m - w.m0 <= kLastOfA || p.n - w.n0 <= kLastOfB;
}

// load_operand() of the first `boxes` boxes.
template <class C>
TC_DEVICE void load_boxes(const Sm90TensorMap& map, u32 to, u32 full, const Share& share,
                          bool batched, int mn, int k, const Work& w, int boxes) {
  for (int box = 0; box < boxes; ++box) {
    load_operand<true, C::kTileK, C::kTileK>(map, to + box * (C::kTileK * 128), full, share,
                                             batched, mn + box * C::kTileK, k, w);
  }
}

// Loads the k blocks of a tile at an edge, as the producer's own loop does those of others.
template <class C>
TC_DEVICE void load_edge(const Sm90MatmulParams& p, u32 shared, u32 full, u32 empty, bool of_a,
                         bool of_b, const Share& share_a, const Share& share_b, const Work& w,
                         int k_count, int k, int step, int& stage, u32& phase) {
  const bool batched = p.flags & kSm90Batched;
  const int rows = of_a ? boxes_inside<C, C::kTileM>(p.m - w.m0) : 0;
  const int columns = of_b ? boxes_inside<C, C::kTileN>(p.n - w.n0) : 0;
  const Panels from = panels_of<C>(w.n0);
  const int whole = of_b ? boxes_inside<C, C::kTileN / 64 * 64>(p.n - from.whole) : 0;
  const int half = of_b && from.half < p.n ? 1 : 0;
#pragma unroll 1
  for (int i = 0; i < k_count; ++i, k += step) {
    barrier_wait_bounded(empty + 8 * stage, phase ^ 1);
    const u32 arrived = full + 8 * stage, to = shared + stage * C::kStageBytes;
    const int boxes = kHasHalves<C> ? whole + half : columns;
    barrier_expect(arrived, (rows + boxes) * (C::kTileK * 128));
    load_boxes<C>(p.a, to, arrived, share_a, batched, w.m0, k, w, rows);
    if constexpr (kHasHalves<C>) {
      load_boxes<C>(p.b, to + C::kABytes, arrived, share_b, batched, from.whole, k, w, whole);
      load_boxes<C>(p.b, to + C::kABytes + C::kTileN / 64 * 8192, arrived, share_b, batched,
                    from.half, k, w, half);
    } else {
      load_boxes<C>(p.b, to + C::kABytes, arrived, share_b, batched, w.n0, k, w, columns);
    }
    if (++stage == C::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
}

// Where to load from, if a cluster's tile lies outside as a whole: anywhere else. Nothing of it is
// stored, but the cluster's other blocks wait for its loads.
TC_DEVICE void move_inside(const Sm90MatmulParams& p, Work& w) {
  if (w.m0 >= p.m) w.m0 = 0;
  if (w.n0 >= p.n) w.n0 = 0;
}

// The last tiles begin sooner, if the host says so, so that none of their rows or columns are
// outside: the TMA takes longer for those than for others. Blocks that share an operand's tile move
// it alike. The flags are at hand; what they follow from would be read from memory here.
template <class C>
TC_DEVICE void begin_sooner(const Sm90MatmulParams& p, Work& w) {
  if constexpr (kHasEdges<C> || C::kFromRegisters) return;
  if (p.flags & kSm90RowsInside && w.m0 < p.m) w.m0 = min(w.m0, p.m - C::kTileM);
  if (p.flags & kSm90ColumnsInside && w.n0 < p.n) w.n0 = min(w.n0, p.n - C::kTileN);
}

}  // namespace sm90
}  // namespace torch_cubin
