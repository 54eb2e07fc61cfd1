// How the producers of sm90.cu and sm90_ping_pong.cu load the stages of a tile: without branches by
// parameters, with which the thread that loads B of a weight gradient's 64 x 128 was busy for 83%
// of the time (H200).
#pragma once

#include "sm90_edge.cuh"
#include "sm90_tiles.cuh"

namespace torch_cubin {
namespace sm90 {

// How a thread loads an operand: not at all, for its block alone, or its part for its cluster.
enum class Load { none, alone, shared };
template <Load kLoad>
struct How {
  static constexpr Load value = kLoad;
};

// load_operand() of a product without batches. Branches by parameters would take longer than the
// load itself.
template <Load kLoad, bool kMnMajor, int kRows, int kTileK>
TC_DEVICE void load_plain(const Sm90TensorMap& map, u32 to, u32 full, const Share& share, int mn,
                          int k) {
  constexpr bool kShared = kLoad == Load::shared;
  const auto load = [&](u32 box, int x, int y) {
    if constexpr (kShared) {
      tma_multicast(box, &map, full, share.mask, x, y);
    } else {
      tma_load(box, &map, full, x, y);
    }
  };
  if constexpr (kMnMajor) {
    const int skipped = kShared ? share.part * (kTileK >> share.log_parts) : 0;
#pragma unroll
    for (int panel = 0; panel < (kRows + kTileK - 1) / kTileK; ++panel) {
      load(to + panel * (kTileK * 128) + skipped * 128, mn + kTileK * panel, k + skipped);
    }
  } else {
    const int skipped = kShared ? share.part * (kRows >> share.log_parts) : 0;
    load(to + skipped * 128, k, mn + skipped);
  }
}

// A producer's position in the ring of stages.
struct Position {
  int stage = 0;
  u32 phase = 0;

  template <class C>
  TC_DEVICE void next() {
    if (++stage == C::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Loads `count` k blocks of a tile, one at least. The first one waits for the kernel before in its
// place, so that its instructions and parameters are there when that ends.
template <class C, Load kA, Load kB>
TC_DEVICE void load_blocks(const Sm90MatmulParams& p, u32 shared, u32 full, const Share& share_a,
                           const Share& share_b, const Work& w, int count, int k, int step,
                           Position& at) {
  u32 arrived = full + 8 * at.stage, to = shared + at.stage * C::kStageBytes;
  const int m = w.m0, n = w.n0;
  const Panels panels = panels_of<C>(n);
  const auto load = [&](auto is_first) {
    barrier_wait_bounded(arrived + 8 * C::kStages, at.phase ^ 1);
    barrier_expect(arrived,
                   (kA != Load::none ? C::kABytes : 0) + (kB != Load::none ? C::kBBytes : 0));
    if constexpr (decltype(is_first)::value) wait_for_previous_grid();
    if constexpr (kA != Load::none) {
      load_plain<kA, C::kAMnMajor, C::kTileM, C::kTileK>(p.a, to, arrived, share_a, m, k);
    }
    if constexpr (kB != Load::none) {
      if constexpr (kHasHalves<C>) {
        constexpr bool kShared = kB == Load::shared;
        const int skipped = kShared ? share_b.part * (C::kTileK >> share_b.log_parts) : 0;
        load_panels<C>(to + C::kABytes + skipped * 128, panels, [&](u32 box, int column) {
          if constexpr (kShared) {
            tma_multicast(box, &p.b, arrived, share_b.mask, column, k + skipped);
          } else {
            tma_load(box, &p.b, arrived, column, k);
          }
        });
      } else {
        load_plain<kB, C::kBMnMajor, C::kTileN, C::kTileK>(p.b, to + C::kABytes, arrived, share_b,
                                                           n, k);
      }
    }
    k += step;
    arrived += 8;
    to += C::kStageBytes;
    at.next<C>();
    if (at.stage == 0) {
      arrived = full;
      to = shared;
    }
  };
  load(Constant<1>{});
#pragma unroll 1
  for (int i = 1; i < count; ++i) load(Constant<0>{});
}

// The same, by the thread that loads A, or the one that loads B, or one that does both.
template <class C>
TC_DEVICE void load_blocks(const Sm90MatmulParams& p, u32 shared, u32 full, bool of_a,
                           const Share& share_a, const Share& share_b, const Work& w, int count,
                           int k, int step, Position& at) {
  const auto load = [&](auto a, auto b) {
    load_blocks<C, decltype(a)::value, decltype(b)::value>(p, shared, full, share_a, share_b, w,
                                                           count, k, step, at);
  };
  const auto load_b = [&](auto a) {
    if (share_b.log_parts != 0) {
      load(a, How<Load::shared>{});
    } else {
      load(a, How<Load::alone>{});
    }
  };
  if constexpr (C::kProducers == 2) {
    if (!of_a) {
      load_b(How<Load::none>{});
    } else if (share_a.log_parts != 0) {
      load(How<Load::shared>{}, How<Load::none>{});
    } else {
      load(How<Load::alone>{}, How<Load::none>{});
    }
  } else if (share_a.log_parts != 0) {
    load_b(How<Load::shared>{});
  } else {
    load_b(How<Load::alone>{});
  }
}

// Loads a tile: `count` k blocks, `step` apart, of which `k` is the first one's first column.
template <class C>
TC_DEVICE void load_tile(const Sm90MatmulParams& p, u32 shared, u32 full, u32 empty, bool of_a,
                         bool of_b, const Share& share_a, const Share& share_b, bool batched,
                         Work& w, int count, int k, int step, Position& at) {
  if constexpr (kHasEdges<C>) {
    if (is_at_edge<C>(p, w)) {
      wait_for_previous_grid();
      load_edge<C>(p, shared, full, empty, of_a, of_b, share_a, share_b, w, count, k, step,
                   at.stage, at.phase);
      return;
    }
  } else {
    move_inside(p, w);
  }
  if (!batched) {
    load_blocks<C>(p, shared, full, of_a, share_a, share_b, w, count, k, step, at);
    return;
  }
  wait_for_previous_grid();
#pragma unroll 1
  for (int i = 0; i < count; ++i, k += step) {
    barrier_wait_bounded(empty + 8 * at.stage, at.phase ^ 1);
    const u32 arrived = full + 8 * at.stage, to = shared + at.stage * C::kStageBytes;
    barrier_expect(arrived, (of_a ? C::kABytes : 0) + (of_b ? C::kBBytes : 0));
    if (of_a) {
      load_operand<C::kAMnMajor, C::kTileM, C::kTileK>(p.a, to, arrived, share_a, true, w.m0, k, w);
    }
    if (of_b) {
      load_b<C>(p.b, to + C::kABytes, arrived, share_b, true, w.n0, k, w);
    }
    at.next<C>();
  }
}

}  // namespace sm90
}  // namespace torch_cubin
