// The structure of a block of the backward pass, for any Config: shapes, shared memory, the
// assignment of warps, its keys and tiles of rows, and its copies. Independent of scores and
// gradients.
#pragma once

#include "tile.cuh"

namespace torch_cubin {

// A product of rows x columns, tiled over kOf warps in a grid; each has kI x kJ tiles m16n8.
template <int kRows_, int kColumns_, int kWarpsDown, int kOf>
struct Share {
  static constexpr int kAcross = kOf / kWarpsDown;
  static constexpr int kWarpRows = kRows_ / kWarpsDown, kWarpColumns = kColumns_ / kAcross;
  static constexpr int kI = kWarpRows / 16, kJ = kWarpColumns / 8;
  static_assert(kWarpRows % 16 == 0 && kWarpColumns % 16 == 0, "whole fragments");
  static TC_DEVICE int warp() { return threadIdx.x / 32 % kOf; }
  static TC_DEVICE int row() { return warp() / kAcross * kWarpRows; }
  static TC_DEVICE int column() { return warp() % kAcross * kWarpColumns; }
};

// Constants derived from a kernel's Config.
template <class Config>
struct BackwardShape : Config {
  using Traits = DTypeTraits<Config::kDType>;
  static constexpr int kRows = Config::kTileM, kColumns = Config::kTileN, kDepth = Config::kTileK;
  static constexpr int kWarps = Config::kThreads / 32;
  static constexpr bool kOneBarrier = Config::kStages == 3;

  // Shared memory: k, v, stages of (q, grad_out), buffers of (P, dS), logsumexp and delta.
  static constexpr int kDepthBytes = 2 * kDepth, kColumnBytes = 2 * kColumns;
  static constexpr u32 kKeyTile = kColumns * kDepthBytes;
  static constexpr u32 kQueryTile = kRows * kDepthBytes;
  static constexpr u32 kScoreTile = kRows * kColumnBytes;
  static constexpr int kBuffers = kOneBarrier ? 2 : 1;
  static constexpr u32 kQueriesAt = 2 * kKeyTile;
  static constexpr u32 kScoresAt = kQueriesAt + 2 * kQueryTile * Config::kStages;
  static constexpr u32 kSumsAt = kScoresAt + 2 * kScoreTile * kBuffers;
  static constexpr u32 kExchangeAt = kSumsAt + 2 * 4 * kRows * kBuffers;
  static constexpr u32 kExchangeBytes = Config::kSplit ? kRows * kColumns * 4 : 0;
  static_assert(kExchangeAt + kExchangeBytes == Config::kDynamicShared,
                "the kernel table's shared memory");

  using ScoreShare =
      Share<kRows, kColumns, Config::kScoreWarps, Config::kSplit ? kWarps / 2 : kWarps>;
  using KeyShare = Share<kColumns, kDepth, Config::kKeyWarps, kWarps>;
  using QueryShare = Share<kRows, kDepth, Config::kQueryWarps, kWarps>;

  // The number of columns of a warp for which scores are computed at a time; more would spill.
  static constexpr int kChunk = ScoreShare::kWarpColumns < 32 ? ScoreShare::kWarpColumns : 32;
  // A warp turns kScoreI x kScoreJ of the tiles into P and dS.
  static constexpr int kScoreI = Config::kSplit ? ScoreShare::kI / 2 : ScoreShare::kI;
  static constexpr int kScoreJ = kChunk / 8;
  static_assert(!Config::kSplit || (ScoreShare::kI == 2 && ScoreShare::kWarpColumns == kChunk),
                "32 x 32");
};

template <int kI, int kJ>
using Tiles = float[kI][kJ][4];

// sum += A B, over 16 kSteps of depth; A's and B's fragments are loaded from shared memory kAhead
// steps before they are used.
template <DType kDType, int kSteps, int kAhead, int kI, int kJ, class A, class B>
TC_DEVICE void multiply(Tiles<kI, kJ>& sum, const A& a_at, u32 a_stage, const B& b_at, u32 b_stage,
                        int b_rows = 0) {
  constexpr int kBuffers = kAhead + 1;
  u32 a[kBuffers][kI][4], b[kBuffers][kJ / 2][4];
  auto load = [&](int step) {
#pragma unroll
    for (int i = 0; i < kI; ++i) {
      a_at.load(a[step % kBuffers][i], a_stage, 16 * (A::kTranspose ? step : i),
                16 * (A::kTranspose ? i : step));
    }
#pragma unroll
    for (int j = 0; j < kJ / 2; ++j) {
      b_at.load(b[step % kBuffers][j], b_stage, b_rows + 16 * (B::kTranspose ? step : j),
                16 * (B::kTranspose ? j : step));
    }
  };
#pragma unroll
  for (int step = 0; step < kAhead; ++step) load(step);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step + kAhead < kSteps) load(step + kAhead);
#pragma unroll
    for (int i = 0; i < kI; ++i) {
#pragma unroll
      for (int jj = 0; jj < kJ; ++jj) {
        int j = i % 2 == 0 ? jj : kJ - 1 - jj;  // adjacent tiles reuse a register operand
        const auto& words = b[step % kBuffers][j / 2];
        mma<kDType>(sum[i][j], a[step % kBuffers][i], words[2 * (j % 2)], words[2 * (j % 2) + 1]);
      }
    }
  }
}

template <int kI, int kJ>
TC_DEVICE void clear(Tiles<kI, kJ>& tiles) {
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int j = 0; j < kJ; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) tiles[i][j][r] = 0.0f;
}

// The key head and columns that a block owns. The first columns come first, since with a causal
// mask they have the longest blocks. Of blocks that take turns at the same rows, each is about a
// step behind the previous one, so a wide bundle lets few of them start together; but the data that
// all blocks of a head read should stay in the L2 cache.
template <class Shape>
TC_DEVICE Work find_columns(const AttentionParams& p) {
  u32 heads = static_cast<u32>(p.heads / p.group);
  u32 tiles = static_cast<u32>((p.seqlen_k + Shape::kColumns - 1) / Shape::kColumns);
  u32 rows = static_cast<u32>(min(p.seqlen_q, 1 << 12) * min(p.group, 64));
  u32 bytes = max(rows, 1u) * (p.head_dim * 8);  // of q, grad_out, dq_sum
  u32 bundle = min(max((32u << 20) / bytes, 32u), 64u) * Shape::kMinBlocks;
  return schedule_work(tiles, heads, p.batch, bundle);
}

// The tiles of rows that attend to columns [column, column_end): [begin, end).
template <class Shape>
struct RowTiles {
  int begin, end;

  TC_DEVICE RowTiles(const Sequence& s, int column, int column_end) {
    int seen_begin = max(column - s.last, 0);
    int seen_end = min(s.rows, column_end - s.first);
    begin = seen_begin / Shape::kRows;
    end = seen_end > seen_begin ? (seen_end + Shape::kRows - 1) / Shape::kRows : begin;
  }
};

// A block's position and its copies to shared memory.
template <class Shape>
struct Block : Shape {
  using Copy = RowCopy<Shape::kRows, Shape::kDepthBytes, Shape::kThreads>;
  using KeyCopy = RowCopy<Shape::kColumns, Shape::kDepthBytes, Shape::kThreads>;

  const AttentionParams& p;
  Sequence s;
  u32 shared;
  int column;  // the block's first

  static TC_DEVICE const char* element(const void* base, tc_int64 index) {
    return static_cast<const char*>(base) + index * 2;
  }

  TC_DEVICE void copy_keys() const {
    int left = s.columns - column;
    KeyCopy(element(p.k, s.k_offset(p, p.k_stride, column)), p.k_stride[2] * 2, p.head_dim * 2)
        .copy_filling(shared, left);
    KeyCopy(element(p.v, s.k_offset(p, p.v_stride, column)), p.v_stride[2] * 2, p.head_dim_v * 2)
        .copy_filling(shared + Shape::kKeyTile, left);
  }

  // Copies tile `tile` of rows of head `head` of the group.
  TC_DEVICE void copy_queries(u32 stage, int head, int tile) const {
    int row = tile * Shape::kRows;
    tc_int64 q = s.q_offset(p, p.q_stride, row) + head * p.q_stride[1];
    tc_int64 grad = s.q_offset(p, p.grad_out_stride, row) + head * p.grad_out_stride[1];
    Copy(element(p.q, q), p.q_stride[2] * 2, p.head_dim * 2).copy_filling(stage, s.rows - row);
    Copy(element(p.grad_out, grad), p.grad_out_stride[2] * 2, p.head_dim_v * 2)
        .copy_filling(stage + Shape::kQueryTile, s.rows - row);
  }

  // This thread's row: logsumexp (in powers of 2) in the first Shape::kRows threads, then delta.
  // Missing rows, and rows that attend to no key, get a logsumexp of inf, so that P is 0.
  TC_DEVICE float fetch_sum(int head, int tile) const {
    static_assert(Shape::kThreads >= 2 * Shape::kRows, "a thread has one row");
    int thread = threadIdx.x, row = tile * Shape::kRows + thread % Shape::kRows;
    bool first = thread < Shape::kRows;
    float value = first ? -kInfinity : 0.0f;
    if (thread < 2 * Shape::kRows && row < s.rows) {
      Sequence of_head = s;
      of_head.head += head;
      value = (first ? p.logsumexp : p.delta)[of_head.row_index(p, row)];
    }
    return value;
  }
  TC_DEVICE void put_sum(float value, int buffer) const {
    // NOTE: the general kernels subtract logsumexp from scores before scaling: masks make both so
    // large (-1e9, finfo.min) that the rounding or overflow of a product would show.
    if (threadIdx.x < Shape::kRows) {
      value = value == -kInfinity ? kInfinity : Shape::kGeneral ? value : value * kLog2e;
    }
    if (threadIdx.x < 2 * Shape::kRows) {
      store_shared(shared + Shape::kSumsAt + buffer * (8 * Shape::kRows) + threadIdx.x * 4, value);
    }
  }
};

}  // namespace torch_cubin
