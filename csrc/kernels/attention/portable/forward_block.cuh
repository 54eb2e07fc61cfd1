// The common structure of the forward kernels. A block finds its tile of rows and brings the tiles
// of k and v that these rows attend to through a ring in shared memory, from right to left, so that
// the tiles that need masking come first if the band is causal. For each tile it calls the four
// steps of a policy, which a kernel's own file defines:
//
//   multiply_qk(q, k)             the accumulators `score` = q . k of the tile at address k
//   weigh(p, s, i, tile)          scores to weights, or the preparation for it
//   multiply_pv(p, s, i, tile, v) out += weights . v
//   store(p, s, i)                after the last tile: out and logsumexp
//
// Between the first two, the block applies the rule of the scores and hides elements outside the
// band. A policy derives from ForwardSums. Beside the steps it has a Config, a Memory
// (ForwardMemory), kGroupRows and group_row(), the rows that a warp or a pair of warps computes,
// lane_column(), a thread's first column of a tile, and two constants: kVote, whether the lanes
// must vote on whether any of them attends to a tile, and kCopyAfterScores, whether the next tile
// is copied after the first product.
#pragma once

#include "epilogue.cuh"
#include "score.cuh"

namespace torch_cubin {

// Shared memory: stages of (k, v), then q. VLayout: the layout of v's tiles.
template <class Config, class VLayout>
struct ForwardMemory {
  static constexpr int kElement = sizeof(typename DTypeTraits<Config::kDType>::Storage);
  static constexpr int kRowBytes = Config::kTileK * kElement;
  static constexpr int kTileBytes = Config::kTileN * kRowBytes;
  using QCopy = RowCopy<Config::kTileM, kRowBytes, Config::kThreads>;
  using KCopy = RowCopy<Config::kTileN, kRowBytes, Config::kThreads>;
  using VCopy = RowCopy<Config::kTileN, kRowBytes, Config::kThreads, VLayout>;
  using Ring = KvRing<KCopy, VCopy, Config::kTileN, kTileBytes, Config::kStages>;
  static constexpr int kQOffset = Config::kStages * Ring::kStageBytes;
  static constexpr int kBytes = kQOffset + Config::kTileM * kRowBytes;
};

// A warp's accumulators for its rows, kBlocks_ blocks of 16. `unit` and `reference` are those of
// softmax.cuh.
template <int kBlocks_, int kScoreTiles_, int kOutTiles_>
struct ForwardSums {
  static constexpr int kBlocks = kBlocks_;          // m16 blocks of rows
  static constexpr int kScoreTiles = kScoreTiles_;  // n8 tiles of scores
  static constexpr int kOutTiles = kOutTiles_;      // n8 tiles of outputs

  float out[kBlocks][kOutTiles][4];
  float score[kBlocks][kScoreTiles][4];  // then weights
  float reference[kBlocks][2];           // of the exponentials, in the units of softmax.cuh
  float sum[kBlocks][2];                 // this lane's columns only
  float unit;

  TC_DEVICE explicit ForwardSums(float unit_) : unit(unit_) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[b][n][e] = 0.0f;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        reference[b][h] = kLowest;
        sum[b][h] = 0.0f;
      }
    }
  }

  TC_DEVICE void clear_scores() {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) score[b][n][e] = 0.0f;
  }
};

// A thread's first row of the tile whose first row is `row`.
template <class Policy>
TC_DEVICE int lane_row(const Policy& policy, int row) {
  return row + policy.group_row() + threadIdx.x % 32 / 4;
}

template <class Policy>
TC_DEVICE void run_forward(const AttentionParams& p) {
  using Config = typename Policy::Config;
  using Memory = typename Policy::Memory;
  constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kStages = Config::kStages;
  constexpr int kElement = Memory::kElement;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ Work kept;
  Work work = find_work<kTileM>(p);
  if (threadIdx.x == 0) kept = work;
  Sequence s(p, work.batch, work.head);
  int row = work.tile * kTileM;
  if (row >= s.rows) return;  // shorter than the longest sequence
  u32 shared = shared_address(shared_memory);

  int from = 0, to = s.columns;
  if (p.splits > 1) {
    from = blockIdx.y * p.columns_per_split;
    to = min(to, from + p.columns_per_split);
  }
  ColumnTiles<kTileN> tiles(s, row, min(row + kTileM, s.rows), from, to);

  int tile = tiles.end - 1;
  typename Memory::QCopy q_copy(
      static_cast<const char*>(p.q) + s.q_offset(p, p.q_stride, row) * kElement,
      p.q_stride[2] * kElement, p.head_dim * kElement);
  typename Memory::Ring ring(p, s, kElement, tile, shared);
  if (tile >= tiles.begin) {
    q_copy.copy_filling(shared + Memory::kQOffset, s.rows - row);
    ring.start(p, tile, tiles.begin, s.columns, Config::kTileK);
    cp_async_wait<kStages - 1>();
    __syncthreads();
  }

  Policy policy(p, shared);
  int i = lane_row(policy, row);
  u32 read = shared;
#pragma unroll 1
  for (; tile >= tiles.begin; --tile) {
    // The tile has arrived, and all threads have read the one that the next copy overwrites.
    if (!Policy::kCopyAfterScores || tile < tiles.end - 1) {
      cp_async_wait<kStages - 2>();
      __syncthreads();
    }
    if constexpr (!Policy::kCopyAfterScores) ring.copy_next(tile, tiles.begin, read);
    int column = tile * kTileN;
    bool whole = tiles.whole(tile);
    // A group whose rows attend to nothing in the tile skips its mma.
    int first = row + policy.group_row();
    bool seen = whole ||
                (column < first + Policy::kGroupRows + s.last && column + kTileN > first + s.first);
    if constexpr (Policy::kVote) seen = __any_sync(~0u, seen);
    if (seen) policy.multiply_qk(shared + Memory::kQOffset, read);
    if constexpr (Policy::kCopyAfterScores) {
      // NOTE: copies are issued here, where the fragments' registers are free and the last mma are
      // still running: before the first loads of fragments they delay the mma.
      if (tile == tiles.end - 1) {
        cp_async_wait<kStages - 2>();  // v
        __syncthreads();
      }
      ring.copy_next(tile, tiles.begin, read);
    }
    if (seen) {
      int j = column + policy.lane_column();
      if constexpr (Config::kGeneral) {
        ScoreRule<Config::kDType> rule(p, s);
#pragma unroll
        for (int b = 0; b < Policy::kBlocks; ++b) {
          apply_to_tiles(rule, policy.score[b], i + 16 * b, j);
        }
      }
      if (!whole) {
#pragma unroll
        for (int b = 0; b < Policy::kBlocks; ++b) hide_outside(policy.score[b], s, i + 16 * b, j);
      }
      policy.weigh(p, s, i, tile);
      policy.multiply_pv(p, s, i, tile, read + Memory::kTileBytes);
    }
    read = ring.next(read);
  }

  // Read and computed again: keeping these in registers through the loop costs more.
  __syncthreads();
  work = kept;
  s = Sequence(p, work.batch, work.head);
  policy.store(p, s, lane_row(policy, work.tile * kTileM));
}

// The end of a warp that has all columns of its rows, the first of which is i: store_row(output,
// half, down, exists, block, factor) writes the row `down` rows below.
template <bool kGeneral, DType kDType, class Policy, class StoreRow>
TC_DEVICE void store_rows(const Policy& policy, const AttentionParams& p, const Sequence& s, int i,
                          StoreRow&& store_row) {
  RowOutput<kDType> output(p, s, i);
#pragma unroll
  for (int b = 0; b < Policy::kBlocks; ++b) {
    unrolled<2>([&](auto half) {
      constexpr int h = decltype(half)::value;
      int down = 16 * b + 8 * h;
      bool exists = i + down < s.rows;
      float maximum = policy.reference[b][h] * (kGeneral ? 1.0f : p.scale);
      float factor = output.finish(p, s.head, down, exists, maximum, policy.sum[b][h]);
      store_row(output, half, down, exists, b, factor);
    });
  }
}

}  // namespace torch_cubin
