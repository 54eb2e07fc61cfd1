// P and dS of a tile from S and dP, for gradient.cu's kernels: every rule of AttentionParams, in
// both orientations. Also the block's shape, which both files need.
#pragma once

#include "score.cuh"

namespace torch_cubin {

// Constants derived from a kernel's Config.
template <class Config>
struct GradientShape : Config {
  static constexpr int kOwn = Config::kOwnsKeys ? Config::kTileN : Config::kTileM;
  static constexpr int kOther = Config::kOwnsKeys ? Config::kTileM : Config::kTileN;
  static constexpr int kWarps = Config::kThreads / 32;
  static constexpr int kPart = Config::kTileK / Config::kSharers;  // columns of a warp
  static constexpr int kTiles = kOther / 8;                        // n8 tiles of S
  static constexpr int kOutTiles = kPart / 8;
  static_assert(kOwn / 16 * Config::kSharers == kWarps, "a warp has 16 rows");
  static_assert(Config::kStages == 1 || Config::kStages == 2,
                "one tile, or the next one beside it");

  // Shared memory: both own tiles; stages of the other two, with their logsumexp and delta if keys
  // are owned; partial sums of S and dP.
  static constexpr int kRowBytes = Config::kTileK * 4;
  static constexpr u32 kOwnTile = kOwn * kRowBytes, kOtherTile = kOther * kRowBytes;
  static constexpr u32 kStage = 2 * kOtherTile + (Config::kOwnsKeys ? 8 * kOther : 0);
  static constexpr u32 kExchangeAt = 2 * kOwnTile + Config::kStages * kStage;
  static constexpr u32 kExchange = Config::kSharers > 1 ? 2 * kTiles * 512 : 0;  // of a warp
  static_assert(kExchangeAt + kWarps * kExchange == Config::kDynamicShared,
                "the kernel table's memory");

  using Scores = float[kTiles][4];
};

template <class Shape>
struct ScoreGradient : Shape {
  using Scores = typename Shape::Scores;
  static constexpr bool kOwnsKeys = Shape::kOwnsKeys;
  static constexpr int kTiles = Shape::kTiles;

  const AttentionParams& p;
  Sequence s;
  int own;                 // the block's first row
  float lse[2], delta[2];  // of this lane's rows g and g + 8, if queries are owned

  // The value subtracted from scores; inf makes every weight of a row that attends to no key 0.
  static TC_DEVICE float reference(float logsumexp) {
    return logsumexp == -kInfinity ? kInfinity : logsumexp;
  }

  static TC_DEVICE int g() { return threadIdx.x % 32 / 4; }
  static TC_DEVICE int t() { return threadIdx.x % 4; }
  static TC_DEVICE int warp_row() { return threadIdx.x / 32 / Shape::kSharers * 16; }

  // Bit 4 n + r: whether dropout keeps element r of tile n of the scores at (i0, j0), the lane's
  // first.
  TC_DEVICE u32 draw(int head, int i0, int j0) const {
    u64 seed = static_cast<u64>(*p.dropout_seed);
    int pair = s.batch * p.heads + head;
    u32 kept = 0;
    auto set = [&](const DropoutBits& bits, int word, bool upper, int e, int index) {
      bool keep = bits.kept(word, e, p.drop_below);
      if (upper) keep = bits.kept((word + 2) % 4, e, p.drop_below);
      kept |= static_cast<u32>(keep) << index;
    };
    if constexpr (kOwnsKeys) {
      bool upper = j0 % 32 >= 16, right = j0 % 2;
#pragma unroll 1
      for (int x = 0; x < 2 * kTiles; ++x) {
        DropoutBits bits(seed, pair, i0 + x / 2 * 8 + x % 2, j0 / 32, j0 % 8 / 2);
#pragma unroll
        for (int h = 0; h < 2; ++h) set(bits, h, upper, right, x / 2 * 4 + 2 * h + x % 2);
      }
    } else {
      bool upper = kTiles == 2 && j0 % 32 >= 16;
#pragma unroll 1
      for (int h = 0; h < 2; ++h) {
        DropoutBits bits(seed, pair, i0 + 8 * h, j0 / 32, j0 % 8 / 2);
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) set(bits, n, upper, e, 4 * n + 2 * h + e);
      }
    }
    return kept;
  }

  static TC_DEVICE void rotate(Scores& tiles) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float kept = tiles[0][r];
#pragma unroll
      for (int n = 1; n < kTiles; ++n) tiles[n - 1][r] = tiles[n][r];
      tiles[kTiles - 1][r] = kept;
    }
  }

  // scores: S, become P, with dropout for dv. grads: dP, become dS, that of the scores before
  // softcap. `stage` has the logsumexp and delta. `other`: the tile's first row.
  TC_DEVICE void differentiate(Scores& scores, Scores& grads, u32 stage, int head, int other,
                               bool edge) const {
    // NOTE: otherwise the compiler keeps values that depend on these through the loop, and spills.
    int mine = own + warp_row() + g(), theirs = other + 2 * t();
    forget(mine);
    forget(theirs);
    int i0 = kOwnsKeys ? theirs : mine, j0 = kOwnsKeys ? mine : theirs;
    auto each = [&](auto&& function) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          int down = 8 * (r / 2), along = 8 * n + r % 2;
          function(scores[n][r], grads[n][r], i0 + (kOwnsKeys ? along : down),
                   j0 + (kOwnsKeys ? down : along), 4 * n + r);
        }
    };
    // Rare features: code for one tile, called for each.
    auto each_in_turn = [&](auto&& function) {
#pragma unroll 1
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          int down = 8 * (r / 2), along = 8 * n + r % 2;
          function(scores[0][r], grads[0][r], i0 + (kOwnsKeys ? along : down),
                   j0 + (kOwnsKeys ? down : along), 0);
        }
        rotate(scores);
        rotate(grads);
      }
    };
    Sequence of_head = s;
    of_head.head += head;
    ScoreRule<Shape::kDType> rule(p, of_head);
    bool drops = p.flags & kAttendDropout;
    u32 kept = drops ? draw(of_head.head, i0, j0) : 0;
    float sums[2][2 * kTiles];  // of the tile's rows, if keys are owned
    auto fetch = [&] {
      if constexpr (kOwnsKeys) {
#pragma unroll
        for (int x = 0; x < 4 * kTiles; ++x) {
          int which = x / (2 * kTiles), row = x % (2 * kTiles);
          int index = which * Shape::kOther + row / 2 * 8 + row % 2 + 2 * t();
          u32 bits;
          load_shared(bits, stage + 2 * Shape::kOtherTile + index * 4);
          sums[which][row] = which == 0 ? reference(__uint_as_float(bits)) : __uint_as_float(bits);
        }
      }
    };
    auto hide = [&] {
      if (!edge) return;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // The columns of the other side visible to row mine + 8 h, counted from `theirs`.
        int row = mine + 8 * h;
        int low = (kOwnsKeys ? row - s.last : row + s.first) - theirs;
        int high = kOwnsKeys ? min(row - s.first, s.rows - 1) : min(row + s.last, s.columns - 1);
        high = kOwnsKeys && row >= s.columns ? -1 : high - theirs;
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            int at = 8 * n + e;
            if (at < low || at > high) scores[n][2 * h + e] = -kInfinity;
          }
      }
    };
    // One of the two sums of element `at` of the tile: its row's logsumexp or delta.
    auto of_row = [&](int which, int at) {
      int n = at / 4, r = at % 4;
      if constexpr (kOwnsKeys) return sums[which][2 * n + r % 2];
      return which == 0 ? lse[r / 2] : delta[r / 2];
    };
    differentiate_rule(
        rule, drops, each, each_in_turn,
        [&](int at) { return kept >> at & 1 ? p.keep_scale : 0.0f; }, fetch,
        [&](int at) { return of_row(1, at); }, hide,
        [&](float logit, int at) {
          // Both may be large and close to each other: only their difference is rounded.
          return exp2_approx((logit - of_row(0, at)) * kLog2e);
        });
  }
};

}  // namespace torch_cubin
