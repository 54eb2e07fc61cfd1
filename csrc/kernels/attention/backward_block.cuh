// What a block of the backward pass is made of: shapes, shared memory, which warp computes what,
// which keys and tiles of rows it has, and its copies. Knows nothing of scores or gradients.
#pragma once

#include "tile.cuh"

namespace torch_cubin {

constexpr DType kDType = DType::TC_DTYPE;
constexpr bool kGeneral = TC_GENERAL;
constexpr int kRows = TC_TILE_M, kColumns = TC_TILE_N, kDepth = TC_TILE_K;
constexpr int kStages = TC_STAGES;
constexpr bool kOneBarrier = kStages == 3;
constexpr int kWarps = TC_THREADS / 32;
constexpr bool kSplit = TC_SPLIT;  // see dots_split
using Traits = DTypeTraits<kDType>;

// Shared memory: k, v, stages of (q, grad_out), buffers of (P, dS), logsumexp and delta.
constexpr int kDepthBytes = 2 * kDepth, kColumnBytes = 2 * kColumns;
constexpr u32 kKeyTile = kColumns * kDepthBytes;
constexpr u32 kQueryTile = kRows * kDepthBytes;
constexpr u32 kScoreTile = kRows * kColumnBytes;
constexpr int kBuffers = kOneBarrier ? 2 : 1;
constexpr u32 kQueriesAt = 2 * kKeyTile;
constexpr u32 kScoresAt = kQueriesAt + 2 * kQueryTile * kStages;
constexpr u32 kSumsAt = kScoresAt + 2 * kScoreTile * kBuffers;
constexpr u32 kExchangeAt = kSumsAt + 2 * 4 * kRows * kBuffers;
constexpr u32 kExchangeBytes = kSplit ? kRows * kColumns * 4 : 0;
constexpr u32 kSharedBytes = kExchangeAt + kExchangeBytes;
static_assert(kSharedBytes == TC_DYNAMIC_SHARED, "the kernel table's shared memory");

// A product of rows x columns, shared out to kOf warps in a grid; each has kI x kJ tiles m16n8.
template <int kRows_, int kColumns_, int kWarpsDown, int kOf = kWarps>
struct Share {
  static constexpr int kAcross = kOf / kWarpsDown;
  static constexpr int kWarpRows = kRows_ / kWarpsDown, kWarpColumns = kColumns_ / kAcross;
  static constexpr int kI = kWarpRows / 16, kJ = kWarpColumns / 8;
  static_assert(kWarpRows % 16 == 0 && kWarpColumns % 16 == 0, "whole fragments");
  static TC_DEVICE int warp() { return threadIdx.x / 32 % kOf; }
  static TC_DEVICE int row() { return warp() / kAcross * kWarpRows; }
  static TC_DEVICE int column() { return warp() % kAcross * kWarpColumns; }
};
using ScoreShare = Share<kRows, kColumns, TC_SCORE_WARPS, kSplit ? kWarps / 2 : kWarps>;
using KeyShare = Share<kColumns, kDepth, TC_KEY_WARPS>;
using QueryShare = Share<kRows, kDepth, TC_QUERY_WARPS>;

// Scores are computed for so many columns of a warp at a time, or registers run out.
constexpr int kChunk = ScoreShare::kWarpColumns < 32 ? ScoreShare::kWarpColumns : 32;
// Of them, a warp turns kScoreI x kScoreJ tiles into P and dS.
constexpr int kScoreI = kSplit ? ScoreShare::kI / 2 : ScoreShare::kI, kScoreJ = kChunk / 8;
static_assert(!kSplit || (ScoreShare::kI == 2 && ScoreShare::kWarpColumns == kChunk), "32 x 32");

template <int kI, int kJ>
using Tiles = float[kI][kJ][4];

// sum += A B, over 16 kSteps of depth; A's and B's fragments come from shared memory, kAhead steps
// before they are used.
template <int kSteps, int kAhead, int kI, int kJ, class A, class B>
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
        int j = i % 2 == 0 ? jj : kJ - 1 - jj;  // neighbours reuse a register operand
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

// Which columns of which key head a block owns. Heads go in bundles; within one the columns ascend
// slowly, so that with a causal mask the longest blocks come first. Of blocks that take turns at
// the same rows, each is most of a step behind the one before it: a wide bundle lets few of them
// start together. But what all blocks of a head read should stay in the L2 cache meanwhile.
struct Place {
  int batch, head, tile;  // head: of k and v

  TC_DEVICE explicit Place(const AttentionParams& p) {
    u32 heads = static_cast<u32>(p.heads / p.group);
    u32 all = heads * static_cast<u32>(p.batch);
    u32 tiles = static_cast<u32>((p.seqlen_k + kColumns - 1) / kColumns);
    u32 rows = static_cast<u32>(min(p.seqlen_q, 1 << 12) * min(p.group, 64));
    u32 bytes = max(rows, 1u) * (p.head_dim * 8);  // of q, grad_out, dq_sum
    u32 bundle = min(min(max((32u << 20) / bytes, 32u), 64u) * TC_MIN_BLOCKS, all);
    u32 index = blockIdx.x / (bundle * tiles);
    u32 within = blockIdx.x - index * (bundle * tiles);
    u32 width = min(all - index * bundle, bundle);
    tile = static_cast<int>(within / width);
    u32 pair = index * bundle + within % width;
    batch = static_cast<int>(pair / heads);
    head = static_cast<int>(pair % heads);
  }
};

// The tiles of rows that see columns [column, column_end): [begin, end).
struct RowTiles {
  int begin, end;

  TC_DEVICE RowTiles(const Sequence& s, int column, int column_end) {
    int seen_begin = max(column - s.last, 0);
    int seen_end = min(s.rows, column_end - s.first);
    begin = seen_begin / kRows;
    end = seen_end > seen_begin ? (seen_end + kRows - 1) / kRows : begin;
  }
};

// One block's place and its copies to shared memory.
struct Block {
  using Copy = RowCopy<kRows, kDepthBytes, TC_THREADS>;
  using KeyCopy = RowCopy<kColumns, kDepthBytes, TC_THREADS>;

  const AttentionParams& p;
  Sequence s;
  u32 shared;
  int column;  // first of the block's

  static TC_DEVICE const char* element(const void* base, tc_int64 index) {
    return static_cast<const char*>(base) + index * 2;
  }

  TC_DEVICE void copy_keys() const {
    int left = s.columns - column;
    KeyCopy(element(p.k, s.k_offset(p, p.k_stride, column)), p.k_stride[2] * 2, p.head_dim * 2)
        .copy_filling(shared, left);
    KeyCopy(element(p.v, s.k_offset(p, p.v_stride, column)), p.v_stride[2] * 2, p.head_dim_v * 2)
        .copy_filling(shared + kKeyTile, left);
  }

  // Of head `head` of the group, tile of rows `tile`.
  TC_DEVICE void copy_queries(u32 stage, int head, int tile) const {
    int row = tile * kRows;
    tc_int64 q = s.q_offset(p, p.q_stride, row) + head * p.q_stride[1];
    tc_int64 grad = s.q_offset(p, p.grad_out_stride, row) + head * p.grad_out_stride[1];
    Copy(element(p.q, q), p.q_stride[2] * 2, p.head_dim * 2).copy_filling(stage, s.rows - row);
    Copy(element(p.grad_out, grad), p.grad_out_stride[2] * 2, p.head_dim_v * 2)
        .copy_filling(stage + kQueryTile, s.rows - row);
  }

  // This thread's row: logsumexp (in powers of 2) in the first kRows threads, then delta. Rows that
  // do not exist, and rows that see nothing, get a logsumexp of inf: their P is 0.
  TC_DEVICE float fetch_sum(int head, int tile) const {
    static_assert(TC_THREADS >= 2 * kRows, "a thread has one row");
    int thread = threadIdx.x, row = tile * kRows + thread % kRows;
    bool first = thread < kRows;
    float value = first ? -kInfinity : 0.0f;
    if (thread < 2 * kRows && row < s.rows) {
      Sequence of_head = s;
      of_head.head += head;
      value = (first ? p.logsumexp : p.delta)[of_head.row_index(p, row)];
    }
    return value;
  }
  TC_DEVICE void put_sum(float value, int buffer) const {
    // NOTE: in the general kernels logsumexp and scores are subtracted before they are scaled: masks
    // make them so large (-1e9, finfo.min) that a product's rounding, or its overflow, would show.
    if (threadIdx.x < kRows) {
      value = value == -kInfinity ? kInfinity : kGeneral ? value : value * kLog2e;
    }
    if (threadIdx.x < 2 * kRows) {
      store_shared(shared + kSumsAt + buffer * (8 * kRows) + threadIdx.x * 4, value);
    }
  }
};

}  // namespace torch_cubin
