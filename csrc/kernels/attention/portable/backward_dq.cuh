// dq_sum: where the backward kernel's blocks, each of which has a few columns only, accumulate dq.
//
// It holds floats in the order of the accumulators: m16n8 tiles of (rows 16 i.., columns 8 j..), j
// fastest, i next, then the sequences; 128 floats a tile. So a warp's addition is one contiguous
// range of memory. In a tile, lane 4 g + t has (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1):
// adjacent if one instruction adds all four (sm_90 and above), else 32 floats apart, so that each
// of four instructions covers 128 contiguous bytes.
//
// Size, in floats: 16 head_dim n, n = batch heads ceil(seqlen_q / 16), and for packed sequences n =
// heads (total_q / 16 + batch).
#pragma once

#include "tile.cuh"

namespace torch_cubin {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr int kDqLaneStep = 4, kDqElementStep = 1;
#else
constexpr int kDqLaneStep = 1, kDqElementStep = 32;
#endif

// Floats from dq_sum to the tile of rows 16 `row_tile`.. and columns 0.. of this sequence.
TC_DEVICE tc_int64 dq_sum_offset(const AttentionParams& p, const Sequence& s, int row_tile) {
  tc_int64 first;
  if (p.cu_seqlens_q != nullptr) {
    first = static_cast<tc_int64>(s.head) * (p.total_q / 16 + p.batch) + s.q_row / 16 + s.batch;
  } else {
    first = (static_cast<tc_int64>(s.batch) * p.heads + s.head) * ((p.seqlen_q + 15) / 16);
  }
  return (first + row_tile) * (p.head_dim * 16);
}

// Stores or adds an accumulator tile. `at` includes this lane's offset.
TC_DEVICE void store_dq(float* at, const float (&v)[4]) {
  if constexpr (kDqElementStep == 1) {
    *reinterpret_cast<float4*>(at) = make_float4(v[0], v[1], v[2], v[3]);
  } else {
#pragma unroll
    for (int r = 0; r < 4; ++r) at[kDqElementStep * r] = v[r];
  }
}

TC_DEVICE void add_dq(float* at, const float (&v)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v[0]), "f"(v[1]),
               "f"(v[2]), "f"(v[3])
               : "memory");
#else
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(at + kDqElementStep * r), "f"(v[r])
                 : "memory");
  }
#endif
}

// The blocks that add to the same rows take turns, by ascending columns, so that every run gives
// the same bits. The first one stores, so dq_sum needs no zeros. A block waits only for blocks of
// smaller indices, which have run or are running. For each kTurnRows rows of a head (of a larger
// tile, its first ones) dq_turn counts the blocks that are done; the delta kernel sets it to 0.
constexpr int kTurnRows = 32;

TC_DEVICE tc_int64 turns_of_head(const AttentionParams& p) {
  return (p.seqlen_q + kTurnRows - 1) / kTurnRows;
}

struct DqTurn {
  int* turn;
  int rank;  // of this block: the number of blocks before it
  int seen;

  // For the tile of rows from `row` on. `tile`: of the block's columns; `first_tile`: the first one
  // that these rows attend to.
  TC_DEVICE DqTurn(const AttentionParams& p, const Sequence& s, int row, int tile, int first_tile) {
    tc_int64 pair = static_cast<tc_int64>(s.batch) * p.heads + s.head;
    turn = p.dq_turn + pair * turns_of_head(p) + row / kTurnRows;
    rank = tile - first_tile;
  }

  // Polls long before the addition: most often the turn has come.
  TC_DEVICE void look() {
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(seen) : "l"(turn) : "memory");
  }

  // NOTE: not an acquiring load. The additions after it happen in the L2 cache and are not issued
  // before the branch; an acquire would only flush the L1 cache.
  TC_DEVICE void wait() {
    while (seen != rank) look();
  }

  // Called by one warp, after a barrier that follows the block's additions. Waits until they are
  // complete, which is cheap if they are old.
  TC_DEVICE void pass() const {
    if (threadIdx.x % 32 == 0) {
      asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(turn), "r"(rank + 1) : "memory");
    }
  }
};

}  // namespace torch_cubin
