// Attention forward for 16-bit types on tensor cores, after FlashAttention-2 (Dao, 2023), with
// instructions of sm_80 (cp.async, ldmatrix, mma.sync), for every architecture from one source.
//
// A block computes TC_TILE_M rows of one head, a warp TC_WARP_ROWS of them: it keeps their sums,
// maxima and outputs in registers while tiles of TC_TILE_N columns of k and v come through a ring
// of TC_STAGES stages in shared memory. Tiles go from right to left, so that the tiles that need
// masks come first where the band is causal. The accumulators of q . k become the A fragments of
// the second product without leaving their registers; exponentials and mma of a tile's parts
// alternate.
//
// `full` kernels (TC_GENERAL 0) know lengths and the band, and need scale > 0. `general` ones may
// spill a few bytes, around code that is slow anyway.
#include "epilogue.cuh"
#include "score.cuh"
#include "softmax.cuh"

namespace torch_cubin {

constexpr DType kDType = DType::TC_DTYPE;
using Storage = DTypeTraits<kDType>::Storage;
constexpr bool kGeneral = TC_GENERAL;
constexpr int kRowBytes = TC_TILE_K * 2;
constexpr int kBlocks = TC_WARP_ROWS / 16;  // m16 blocks of a warp
constexpr int kScoreTiles = TC_TILE_N / 8;  // n8 tiles of scores
constexpr int kOutTiles = TC_TILE_K / 8;    // of outputs
constexpr int kSteps = TC_TILE_K / 16;      // mma steps along head_dim
static_assert(TC_TILE_M / TC_WARP_ROWS * 32 == TC_THREADS, "the block must hold the tile's warps");
static_assert(TC_TILE_N % 32 == 0, "dropout numbers come for 32 columns");

using QCopy = RowCopy<TC_TILE_M, kRowBytes, TC_THREADS>;
using KvCopy = RowCopy<TC_TILE_N, kRowBytes, TC_THREADS>;
constexpr int kTileBytes = TC_TILE_N * kRowBytes;
using Ring = KvRing<KvCopy, KvCopy, TC_TILE_N, kTileBytes, TC_STAGES>;
constexpr int kQOffset = TC_STAGES * Ring::kStageBytes;
static_assert(kQOffset + TC_TILE_M * kRowBytes == TC_DYNAMIC_SHARED,
              "the kernel table's shared memory");

struct Attention {
  float out[kBlocks][kOutTiles][4];
  float score[kBlocks][kScoreTiles][4];  // then weights
  float reference[kBlocks][2];           // of the exponentials; log2 (full) or natural (general)
  float sum[kBlocks][2];                 // this lane's columns only
  FragmentAddress<Fragment::a, kRowBytes> q_address;
  FragmentAddress<Fragment::b, kRowBytes> k_address;
  FragmentAddress<Fragment::b_transposed, kRowBytes> v_address;

  TC_DEVICE explicit Attention(int warp_row) : q_address(warp_row), k_address(0), v_address(0) {
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

  // score = q . k
  TC_DEVICE void multiply_qk(u32 q_shared, u32 k_shared) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) score[b][n][e] = 0.0f;
    constexpr int kPairs = kScoreTiles / 2;
    constexpr int kSlots = kSteps * kPairs;
    u32 q[kBlocks][4], k[2][4];
    k_address.load(k[0], k_shared, 0, 0);
    unrolled<kSlots>([&](auto constant) {
      constexpr int now = decltype(constant)::value, next = now + 1;
      constexpr int step = now / kPairs, n = now % kPairs;
      if constexpr (n == 0) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) q_address.load(q[b], q_shared, 16 * b, 16 * step);
      }
      if constexpr (next < kSlots) {
        k_address.load(k[next % 2], k_shared, 16 * (next % kPairs), 16 * (next / kPairs));
      }
      const auto& words = k[now % 2];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        mma<kDType>(score[b][2 * n], q[b], words[0], words[1]);
        mma<kDType>(score[b][2 * n + 1], q[b], words[2], words[3]);
      }
    });
  }

  // out += exp(score) . v; `drop(b, n)` may clear weights of 32 columns, from n8 tile n on.
  template <class Drop>
  TC_DEVICE void multiply_pv(u32 v_shared, float unit, Drop&& drop) {
    constexpr int kPairs = kOutTiles / 2;
    constexpr int kDepth = TC_TILE_N / 16;
    u32 v[2][4];
    v_address.load(v[0], v_shared, 0, 0);
#pragma unroll
    for (int step = 0; step < kDepth; ++step) {
      u32 weights[kBlocks][4];
      if (!kGeneral || step % 2 == 0) {
        exponentiate<kGeneral>(score, sum, reference, 2 * step, unit);
        exponentiate<kGeneral>(score, sum, reference, 2 * step + 1, unit);
      }
      if constexpr (kGeneral) {
        if (step % 2 == 0) {
          exponentiate<kGeneral>(score, sum, reference, 2 * step + 2, unit);
          exponentiate<kGeneral>(score, sum, reference, 2 * step + 3, unit);
          drop(2 * step);
        }
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        pack_fragment<kDType>(weights[b], score[b][2 * step], score[b][2 * step + 1]);
      }
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        int now = step * kPairs + n, next = now + 1;
        if (next < kDepth * kPairs) {
          v_address.load(v[next % 2], v_shared, 16 * (next / kPairs), 16 * (next % kPairs));
        }
        const auto& words = v[now % 2];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          mma<kDType>(out[b][2 * n], weights[b], words[0], words[1]);
          mma<kDType>(out[b][2 * n + 1], weights[b], words[2], words[3]);
        }
      }
    }
  }
};

}  // namespace torch_cubin

extern "C" __global__ void __launch_bounds__(TC_THREADS, TC_MIN_BLOCKS)
    TC_KERNEL(const __grid_constant__ torch_cubin::AttentionParams p) {
  using namespace torch_cubin;
  wait_for_previous_kernel();
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ Work kept;
  Work work = find_work<TC_TILE_M>(p);
  if (threadIdx.x == 0) kept = work;
  Sequence s(p, work.batch, work.head);
  int row = work.tile * TC_TILE_M;
  if (row >= s.rows) return;  // a shorter sequence than the longest
  u32 shared = shared_address(shared_memory);

  int from = 0, to = s.columns;
  if (p.splits > 1) {
    from = blockIdx.y * p.columns_per_split;
    to = min(to, from + p.columns_per_split);
  }
  ColumnTiles<TC_TILE_N> tiles(s, row, min(row + TC_TILE_M, s.rows), from, to);

  int tile = tiles.end - 1;
  QCopy q_copy(static_cast<const Storage*>(p.q) + s.q_offset(p, p.q_stride, row), p.q_stride[2] * 2,
               p.head_dim * 2);
  Ring ring(p, s, 2, tile, shared);
  if (tile >= tiles.begin) {
    q_copy.copy_filling(shared + kQOffset, s.rows - row);
    ring.start(p, tile, tiles.begin, s.columns, TC_TILE_K);
    cp_async_wait<TC_STAGES - 1>();
    __syncthreads();
  }

  int warp_row = threadIdx.x / 32 * TC_WARP_ROWS;
  int i = row + warp_row + threadIdx.x % 32 / 4, j_lane = threadIdx.x % 4 * 2;
  float unit = kGeneral ? 1.0f : p.scale * kLog2e;
  Attention attention(warp_row);
  u32 read = shared;
#pragma unroll 1
  for (; tile >= tiles.begin; --tile) {
    // The tile is there, and all have read the one that the next copy overwrites.
    if (tile < tiles.end - 1) {
      cp_async_wait<TC_STAGES - 2>();
      __syncthreads();
    }
    int column = tile * TC_TILE_N;
    bool whole = tiles.whole(tile);
    // A warp whose rows see nothing of the tile has no mma to do.
    int warp_from = row + static_cast<int>(threadIdx.x) / 32 * TC_WARP_ROWS;
    bool seen = __any_sync(~0u, whole || (column < warp_from + TC_WARP_ROWS + s.last &&
                                          column + TC_TILE_N > warp_from + s.first));
    if (seen) attention.multiply_qk(shared + kQOffset, read);
    // NOTE: copies come here, where the fragments' registers are free and the last mma are still
    // running: before the first loads of fragments they delay the mma.
    if (tile == tiles.end - 1) {
      cp_async_wait<TC_STAGES - 2>();  // v
      __syncthreads();
    }
    ring.copy_next(tile, tiles.begin, read);
    if (seen) {
      int j = column + j_lane;
      if constexpr (kGeneral) {
        ScoreRule<kDType> rule(p, s);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          apply_rule(rule, attention.score[b], p, s, i + 16 * b, j);
        }
      }
      if (!whole) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) hide_outside(attention.score[b], s, i + 16 * b, j);
      }
      follow_maximum<kGeneral>(attention.score, attention.out, attention.sum, attention.reference,
                               unit);
      attention.multiply_pv(read + kTileBytes, unit, [&](int n) {
        if (!(p.flags & kAttendDropout)) return;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          drop_weights(attention.score[b], p, s, i + 16 * b, column, n);
        }
      });
    }
    read = ring.next(read);
  }

  // Read and computed again: registers that keep these through the loop are dearer.
  __syncthreads();
  work = kept;
  s = Sequence(p, work.batch, work.head);
  i = work.tile * TC_TILE_M + warp_row + threadIdx.x % 32 / 4;
  RowOutput<kDType> output(p, s, i);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    unrolled<2>([&](auto half) {
      constexpr int h = decltype(half)::value;
      int down = 16 * b + 8 * h;
      bool exists = i + down < s.rows;
      float maximum = kGeneral ? attention.reference[b][h] : attention.reference[b][h] * kLn2;
      float factor = output.finish(p, s.head, down, exists, maximum, attention.sum[b][h]);
      output.store<h>(p, down, exists, attention.out[b], factor);
    });
  }
}
/* torch_cubin kernels
{"virtual_arch": [80, 90],
 "defaults": {
  "kind": "mma", "dtype": "{d.dtype}", "math": "{d.dtype}", "alignment": 16, "tile": "{t.tile}",
  "stages": 2, "block": ["{t.threads}", 1, 1], "dynamic_shared": "{t.shared}", "cost": "{t.cost}",
  "defines": {"TC_DTYPE": "{d.dtype}", "TC_WARP_ROWS": "{t.warp_rows}", "TC_MIN_BLOCKS": "{t.blocks}",
              "TC_GENERAL": "{general}"}},
 "kernels": [
  {"name": "mma_attention_{d.short}_full_{t.name}", "layout": "full", "archs": "{t.archs}",
   "for": {
    "d": [{"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"}],
    "general": [0],
    "t": [
     {"name": "128x32x256", "tile": [128, 32, 256], "warp_rows": 16, "threads": 256,
      "shared": 131072, "blocks": 1, "archs": ["sm_80"],
      "cost": {"k_tile": 3500, "fixed": 7000}},
     {"name": "64x32x256", "tile": [64, 32, 256], "warp_rows": 16, "threads": 128,
      "shared": 98304, "blocks": 2, "archs": ["sm_86", "sm_89", "sm_120a"],
      "cost": {"k_tile": 3500, "fixed": 7000}}]}},
  {"name": "mma_attention_{d.short}_full_{t.name}", "layout": "full",
   "for": {
    "d": [{"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"}],
    "general": [0],
    "t": [
     {"name": "128x128x64", "tile": [128, 128, 64], "warp_rows": 32, "threads": 128,
      "shared": 81920, "blocks": 2, "cost": {"k_tile": 5600, "fixed": 6000}},
     {"name": "128x64x128", "tile": [128, 64, 128], "warp_rows": 32, "threads": 128,
      "shared": 98304, "blocks": 2, "cost": {"k_tile": 4700, "fixed": 6000}}]}},
  {"name": "mma_attention_{d.short}_general_{t.name}", "layout": "general",
   "accepted_spill": {"sm_80": 16, "sm_86": 16, "sm_89": 16, "sm_100a": 16, "sm_120a": 32},
   "for": {
    "d": [{"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"}],
    "general": [1],
    "t": [
     {"name": "128x64x64", "tile": [128, 64, 64], "warp_rows": 32, "threads": 128,
      "shared": 49152, "blocks": 2, "cost": {"k_tile": 4000, "fixed": 5000}},
     {"name": "128x32x128", "tile": [128, 32, 128], "warp_rows": 32, "threads": 128,
      "shared": 65536, "blocks": 2, "cost": {"k_tile": 4000, "fixed": 7000}},
     {"name": "64x32x256", "tile": [64, 32, 256], "warp_rows": 16, "threads": 128,
      "shared": 98304, "blocks": 2, "cost": {"k_tile": 4000, "fixed": 7000}}]}}]}
*/
