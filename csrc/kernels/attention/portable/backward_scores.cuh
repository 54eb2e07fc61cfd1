// The first half of a step of the backward pass: P and dS of a tile of rows, rounded, in shared
// memory, from q, k, grad_out and v there.
#pragma once

#include "backward_block.cuh"
#include "common/dropout.cuh"
#include "score.cuh"

namespace torch_cubin {

template <class Shape>
struct Scores : Block<Shape> {
  using Block<Shape>::p, Block<Shape>::s, Block<Shape>::shared, Block<Shape>::column;
  using ScoreShare = typename Shape::ScoreShare;

  // This thread's logsumexp and delta of rows g and g + 8 of kI tiles, from row `row` on.
  template <int kI>
  TC_DEVICE void get_sums(float (&lse)[kI][2], float (&delta)[kI][2], int row, int buffer) const {
    u32 at =
        shared + Shape::kSumsAt + buffer * (8 * Shape::kRows) + (row + threadIdx.x % 32 / 4) * 4;
#pragma unroll
    for (int i = 0; i < kI; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        u32 bits[2];
        load_shared(bits[0], at + (16 * i + 8 * h) * 4);
        load_shared(bits[1], at + (16 * i + 8 * h + Shape::kRows) * 4);
        lse[i][h] = __uint_as_float(bits[0]);
        delta[i][h] = __uint_as_float(bits[1]);
      }
    }
  }

  using QFragment = FragmentAddress<Fragment::a, Shape::kDepthBytes>;
  using KFragment = FragmentAddress<Fragment::b, Shape::kDepthBytes>;

  // score = q k^T and grad = grad_out v^T (minus delta in full kernels).
  TC_DEVICE void dots(Tiles<Shape::kScoreI, Shape::kScoreJ>& score,
                      Tiles<Shape::kScoreI, Shape::kScoreJ>& grad,
                      const float (&delta)[Shape::kScoreI][2], u32 stage, int c) const {
    QFragment q_at(ScoreShare::row());
    KFragment k_at(ScoreShare::column());
    clear(score);
    start_at_delta(grad, delta, true);
    multiply<Shape::kDType, Shape::kDepth / 16, Shape::kScoreAhead>(score, q_at, stage, k_at,
                                                                    shared, c);
    multiply<Shape::kDType, Shape::kDepth / 16, Shape::kScoreAhead>(
        grad, q_at, stage + Shape::kQueryTile, k_at, shared + Shape::kKeyTile, c);
  }

  // With a split, half of the warps compute 32 x 32 elements of one product, the other half of the
  // other: that reads two thirds of the data that 16 x 32 of both would. Then each warp exchanges
  // half of its elements with the warp that has the other product at the same position. (64 x 64 at
  // depth 256: 656 KiB a step instead of 752, and 5% less time on an H200.)
  TC_DEVICE void dots_split(Tiles<Shape::kScoreI, Shape::kScoreJ>& score,
                            Tiles<Shape::kScoreI, Shape::kScoreJ>& grad, int half, u32 stage,
                            int buffer) const {
    Tiles<2, Shape::kScoreJ> sum;
    float lse[2][2], delta[2][2];
    get_sums(lse, delta, ScoreShare::row(), buffer);
    start_at_delta(sum, delta, half == 1);
    multiply<Shape::kDType, Shape::kDepth / 16, Shape::kScoreAhead>(
        sum, QFragment(ScoreShare::row()), stage + half * Shape::kQueryTile,
        KFragment(ScoreShare::column()), shared + half * Shape::kKeyTile);
    u32 at = shared + Shape::kExchangeAt + threadIdx.x % (Shape::kThreads / 2) * 16;
    constexpr u32 kStep = Shape::kThreads / 2 * 16, kHalf = Shape::kScoreJ * kStep;
#pragma unroll
    for (int j = 0; j < Shape::kScoreJ; ++j) {
      float give[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) give[r] = half == 1 ? sum[0][j][r] : sum[1][j][r];
      store_shared(at + half * kHalf + j * kStep, give);
    }
    asm volatile("bar.sync %0, 64;" ::"r"(1 + ScoreShare::warp()) : "memory");
#pragma unroll
    for (int j = 0; j < Shape::kScoreJ; ++j) {
      float got[4];
      load_shared(got, at + (1 - half) * kHalf + j * kStep);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        score[0][j][r] = half == 1 ? got[r] : sum[0][j][r];
        grad[0][j][r] = half == 1 ? sum[1][j][r] : got[r];
      }
    }
  }

  template <int kI>
  static TC_DEVICE void start_at_delta(Tiles<kI, Shape::kScoreJ>& sum, const float (&delta)[kI][2],
                                       bool yes) {
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int j = 0; j < Shape::kScoreJ; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r)
          sum[i][j][r] = Shape::kGeneral || !yes ? 0.0f : -delta[i][r / 2];
  }

  // Writes P and dS of the tile of rows `tile` to `to`.
  TC_DEVICE void scores(u32 stage, u32 to, int buffer, int head, int tile) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int half = Shape::kSplit ? threadIdx.x / (Shape::kThreads / 2) : 0;
    int row = ScoreShare::row() + 16 * half, first = tile * Shape::kRows;
    bool edge = column + Shape::kColumns > s.columns ||
                first + s.last < column + Shape::kColumns - 1 ||
                first + Shape::kRows - 1 + s.first > column;
    u32 store = to + Swizzle<Shape::kColumnBytes, true>::offset(row + g, 0) + t * 4;
#pragma unroll
    for (int c = 0; c < ScoreShare::kWarpColumns; c += Shape::kChunk) {
      Tiles<Shape::kScoreI, Shape::kScoreJ> score, grad;
      float lse[Shape::kScoreI][2], delta[Shape::kScoreI][2];
      get_sums(lse, delta, row, buffer);
      if constexpr (Shape::kSplit) {
        dots_split(score, grad, half, stage, buffer);
      } else {
        dots(score, grad, delta, stage, c);
      }
      int i0 = first + row + g, j0 = column + ScoreShare::column() + c + 2 * t;
      if constexpr (Shape::kGeneral) {
        differentiate_general(score, grad, lse, delta, edge, head, i0, j0);
      } else if (edge) {
        differentiate<true>(score, grad, lse, i0, j0);
      } else {
        differentiate<false>(score, grad, lse, i0, j0);
      }
#pragma unroll
      for (int i = 0; i < Shape::kScoreI; ++i) {
#pragma unroll
        for (int j = 0; j < Shape::kScoreJ; ++j) {
          int bytes = (ScoreShare::column() + c + 8 * j) * 2;
          u32 at = (store ^ (bytes & (Shape::kColumnBytes - 1) & 127)) + (bytes & ~127) +
                   16 * i * Shape::kColumnBytes;
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            u32 down = at + 8 * h * Shape::kColumnBytes;
            store_shared(down, Shape::Traits::pack(score[i][j][2 * h], score[i][j][2 * h + 1]));
            store_shared(down + Shape::kScoreTile,
                         Shape::Traits::pack(grad[i][j][2 * h], grad[i][j][2 * h + 1]));
          }
        }
      }
    }
  }

  // score: q.k, becomes P. grad: dP - delta, becomes dS. The lane's first element is (i0, j0).
  template <bool kEdge>
  TC_DEVICE void differentiate(Tiles<Shape::kScoreI, Shape::kScoreJ>& score,
                               Tiles<Shape::kScoreI, Shape::kScoreJ>& grad,
                               const float (&lse)[Shape::kScoreI][2], int i0, int j0) const {
    float factor = p.scale * kLog2e;
#pragma unroll
    for (int i = 0; i < Shape::kScoreI; ++i) {
#pragma unroll
      for (int j = 0; j < Shape::kScoreJ; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) score[i][j][r] = fmaf(score[i][j][r], factor, -lse[i][r / 2]);
      if constexpr (kEdge) hide_outside(score[i], s, i0 + 16 * i, j0);
#pragma unroll
      for (int j = 0; j < Shape::kScoreJ; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          score[i][j][r] = exp2_approx(score[i][j][r]);
          grad[i][j][r] *= score[i][j][r];
        }
    }
  }

  // The same with all features of a score. P, for dv, includes dropout; dS is that of the scores
  // before softcap. grad: dP, becomes dS.
  TC_DEVICE void differentiate_general(Tiles<Shape::kScoreI, Shape::kScoreJ>& score,
                                       Tiles<Shape::kScoreI, Shape::kScoreJ>& grad,
                                       const float (&lse)[Shape::kScoreI][2],
                                       const float (&delta)[Shape::kScoreI][2], bool edge, int head,
                                       int i0, int j0) const {
    Sequence of_head = s;
    of_head.head += head;
    ScoreRule<Shape::kDType> rule(p, of_head);
    bool drops = p.flags & kAttendDropout;
    u64 seed = drops ? static_cast<u64>(*p.dropout_seed) : 0;
#pragma unroll
    for (int i = 0; i < Shape::kScoreI; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int row = i0 + 16 * i + 8 * h;
        SeenColumns within(s, row, j0);
        u32 bits[4];
        if (drops) {
          DropoutBits drawn(seed, of_head.batch * p.heads + of_head.head, row, j0 / 32, j0 % 8 / 2);
          bool upper = Shape::kChunk < 32 && j0 % 32 >= 16;
#pragma unroll
          for (int j = 0; j < 4; ++j)
            bits[j] = j < 2 && upper ? drawn.words[(j + 2) % 4] : drawn.words[j];
        }
#pragma unroll
        for (int j = 0; j < Shape::kScoreJ; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            int r = 2 * h + e;
            auto keep = [&](int) {
              int number = e == 0 ? bits[j] & 0xFFFF : bits[j] >> 16;
              return !drops ? 1.0f : number >= p.drop_below ? p.keep_scale : 0.0f;
            };
            auto element = [&](auto&& function) {
              function(score[i][j][r], grad[i][j][r], row, j0 + 8 * j + e, 0);
            };
            differentiate_rule(
                rule, true, element, element, keep, [] {}, [&](int) { return delta[i][h]; },
                [&] {
                  if (edge && !within(8 * j + e)) score[i][j][r] = -kInfinity;
                },
                [&](float logit, int) { return exp2_approx((logit - lse[i][h]) * kLog2e); });
          }
        }
      }
    }
  }
};

}  // namespace torch_cubin
