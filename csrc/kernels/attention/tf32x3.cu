// Attention forward for float32 on tensor cores, each product as three of TF32
// (tf32x3_product.cuh). Otherwise as mma.cu, which see.
//
// Key 8 n + 2 t of a tile is column t of an A fragment of weights, key 8 n + 2 t + 1 column t + 4:
// so the accumulators of q . k are A fragments without leaving their lanes. The columns of the
// outputs are permuted too: n8 tile 4 q + j holds columns 32 q + 4 g + j, so that a lane reads v
// and writes out in vectors of 16 bytes.
//
// The spills that the table accepts are a few scalars of a tile, where a warp has 32 rows.
#include "epilogue.cuh"
#include "score.cuh"
#include "softmax.cuh"
#include "tf32x3_product.cuh"

namespace torch_cubin {

constexpr DType kDType = DType::float32;
constexpr bool kGeneral = TC_GENERAL;
constexpr int kRowBytes = TC_TILE_K * 4;
constexpr int kBlocks = TC_WARP_ROWS / 16;
constexpr int kScoreTiles = TC_TILE_N / 8;
constexpr int kOutTiles = TC_TILE_K / 8;
constexpr int kSteps = TC_TILE_K / 8;  // mma steps along head_dim
static_assert(TC_TILE_M / TC_WARP_ROWS * 32 == TC_THREADS, "the block must hold the tile's warps");

// For reads of 16 bytes from 4 even (or odd) rows by 2 neighbours each: see multiply_pv.
struct PairSwizzle {
  static TC_DEVICE int offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ (row & 6)) << 4);
  }
};

using QCopy = RowCopy<TC_TILE_M, kRowBytes, TC_THREADS>;
using KCopy = RowCopy<TC_TILE_N, kRowBytes, TC_THREADS>;
using VCopy = RowCopy<TC_TILE_N, kRowBytes, TC_THREADS, PairSwizzle>;
constexpr int kTileBytes = TC_TILE_N * kRowBytes;
using Ring = KvRing<KCopy, VCopy, TC_TILE_N, kTileBytes, TC_STAGES>;
constexpr int kQOffset = TC_STAGES * Ring::kStageBytes;
static_assert(kQOffset + TC_TILE_M * kRowBytes == TC_DYNAMIC_SHARED, "the kernel table's memory");

struct Attention {
  float out[kBlocks][kOutTiles][4];
  float score[kBlocks][kScoreTiles][4];
  float reference[kBlocks][2], sum[kBlocks][2];
  FragmentAddress<Fragment::a, kRowBytes> q_address;
  FragmentAddress<Fragment::b, kRowBytes> k_address;

  TC_DEVICE explicit Attention(int warp_row) : q_address(warp_row), k_address(0) {
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

  TC_DEVICE void multiply_qk(u32 q_shared, u32 k_shared) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) score[b][n][e] = 0.0f;
#pragma unroll 1  // unrolled, it needs more registers than there are
    for (int quad = 0; quad < kSteps / 4; ++quad, q_shared += 128, k_shared += 128)
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        Split<2> k[kScoreTiles];
#pragma unroll
        for (int n = 0; n < kScoreTiles; n += 2) {
          u32 words[4];
          k_address.load(words, k_shared, 8 * n, 16 * step);
#pragma unroll
          for (int i = 0; i < 4; ++i) k[n + i / 2].set(i % 2, words[i]);
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          Split<4> q;
          u32 words[4];
          q_address.load(words, q_shared, 16 * b, 16 * step);
#pragma unroll
          for (int i = 0; i < 4; ++i) q.set(i, words[i]);
          multiply_add<true>(score[b], 0, q, k);
        }
      }
  }

  // out += weights . v
  TC_DEVICE void multiply_pv(u32 v_shared) {
    int t = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
    u32 base = v_shared + PairSwizzle::offset(2 * t, g);
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      Split<4> weights[kBlocks];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          weights[b].set(i, __float_as_uint(score[b][n][i % 2 * 2 + i / 2]));
        }
#pragma unroll
      for (int q = 0; q < kOutTiles / 4; ++q) {
        // NOTE: never true. Without a branch here ptxas loads so far ahead that it has to spill.
        if (q % 2 == 0 && __any_sync(~0u, base == 1)) return;
        Split<2> v[4];
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          u32 words[4];
          load_shared(words, base + (8 * n + odd) * kRowBytes + q * 128);
#pragma unroll
          for (int j = 0; j < 4; ++j) v[j].set(odd, words[j]);
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) multiply_add<true>(out[b], 4 * q, weights[b], v);
      }
    }
  }
};

// Row `down` below: elements 2 kHalf and 2 kHalf + 1 of all tiles.
template <int kHalf>
TC_DEVICE void store(const AttentionParams& p, const RowOutput<kDType>& output, int down,
                     bool exists, const float (&sum)[kOutTiles][4], float factor) {
  float* to =
      p.splits > 1 ? output.partial_out + down * p.head_dim_v : output.out + down * p.out_stride[2];
#pragma unroll
  for (int q = 0; q < kOutTiles / 4; ++q)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int column = 32 * q + 8 * (threadIdx.x % 4) + 4 * e;
      const auto* tiles = &sum[4 * q];
      constexpr int h = 2 * kHalf;
      if (exists && column < p.head_dim_v) {
        *reinterpret_cast<float4*>(to + column) =
            make_float4(tiles[0][h + e] * factor, tiles[1][h + e] * factor,
                        tiles[2][h + e] * factor, tiles[3][h + e] * factor);
      }
    }
}

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
  QCopy q_copy(static_cast<const float*>(p.q) + s.q_offset(p, p.q_stride, row), p.q_stride[2] * 4,
               p.head_dim * 4);
  Ring ring(p, s, 4, tile, shared);
  if (tile >= tiles.begin) {
    q_copy.copy_filling(shared + kQOffset, s.rows - row);
    ring.start(p, tile, tiles.begin, s.columns, TC_TILE_K);
    cp_async_wait<TC_STAGES - 1>();
    __syncthreads();
  }

  int warp_row = threadIdx.x / 32 * TC_WARP_ROWS;
  int i = row + warp_row + threadIdx.x % 32 / 4;
  float unit = kGeneral ? 1.0f : p.scale * kLog2e;
  Attention attention(warp_row);
  u32 read = shared;
#pragma unroll 1
  for (; tile >= tiles.begin; --tile) {
    // The tile is there, and all have read the one that is overwritten.
    cp_async_wait<TC_STAGES - 2>();
    __syncthreads();
    ring.copy_next(tile, tiles.begin, read);
    int column = tile * TC_TILE_N;
    bool whole = tiles.whole(tile);
    // A warp whose rows see nothing of the tile has no mma to do.
    int warp_from = row + static_cast<int>(threadIdx.x) / 32 * TC_WARP_ROWS;
    if (__any_sync(~0u, whole || (column < warp_from + TC_WARP_ROWS + s.last &&
                                  column + TC_TILE_N > warp_from + s.first))) {
      attention.multiply_qk(shared + kQOffset, read);
      int j = column + threadIdx.x % 4 * 2;
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
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
        exponentiate<kGeneral>(attention.score, attention.sum, attention.reference, n, unit);
      }
      if (kGeneral && (p.flags & kAttendDropout)) {
#pragma unroll
        for (int n = 0; n < kScoreTiles; n += 4)
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) {
            drop_weights(attention.score[b], p, s, i + 16 * b, column, n);
          }
      }
      attention.multiply_pv(read + kTileBytes);
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
      store<h>(p, output, down, exists, attention.out[b], factor);
    });
  }
}
/* torch_cubin kernels
{"virtual_arch": [80, 90],
 "defaults": {
  "kind": "mma", "dtype": "float32", "math": "float32", "alignment": 16, "tile": "{t.tile}",
  "layout": "{l.layout}", "stages": 2, "block": ["{t.threads}", 1, 1],
  "dynamic_shared": "{t.shared}", "cost": "{t.cost}",
  "defines": {"TC_GENERAL": "{l.general}", "TC_WARP_ROWS": "{t.rows}", "TC_MIN_BLOCKS": "{t.blocks}"}},
 "kernels": [
  {"name": "tf32x3_attention_{l.layout}_{t.name}",
   "accepted_spill": {"sm_80": 64, "sm_86": 64, "sm_89": 64, "sm_90a": 64, "sm_100a": 64, "sm_120a": 64},
   "for": {
    "l": [{"layout": "full", "general": 0}],
    "t": [
     {"name": "128x32x64", "tile": [128, 32, 64], "rows": 32, "threads": 128, "shared": 65536,
      "blocks": 2, "cost": {"k_tile": 7600, "fixed": 6000}}]}},
  {"name": "tf32x3_attention_{l.layout}_{t.name}",
   "for": {
    "l": [{"layout": "general", "general": 1}],
    "t": [
     {"name": "64x32x64", "tile": [64, 32, 64], "rows": 16, "threads": 128, "shared": 49152,
      "blocks": 2, "cost": {"k_tile": 5000, "fixed": 6000}}]}},
  {"name": "tf32x3_attention_{l.layout}_{t.name}",
   "for": {
    "l": [{"layout": "full", "general": 0}, {"layout": "general", "general": 1}],
    "t": [
     {"name": "64x32x128", "tile": [64, 32, 128], "rows": 16, "threads": 128, "shared": 98304,
      "blocks": 2, "cost": {"k_tile": 7500, "fixed": 8000}}]}},
  {"name": "tf32x3_attention_{l.layout}_{t.name}", "archs": "{t.archs}",
   "for": {
    "l": [{"layout": "full", "general": 0}, {"layout": "general", "general": 1}],
    "t": [
     {"name": "128x16x256", "tile": [128, 16, 256], "rows": 16, "threads": 256, "shared": 196608,
      "blocks": 1, "archs": ["sm_90a", "sm_100a"], "cost": {"k_tile": 8000, "fixed": 9000}},
     {"name": "64x16x256", "tile": [64, 16, 256], "rows": 16, "threads": 128, "shared": 131072,
      "blocks": 1, "archs": ["sm_80"], "cost": {"k_tile": 5000, "fixed": 9000}},
     {"name": "32x16x256", "tile": [32, 16, 256], "rows": 16, "threads": 64, "shared": 98304,
      "blocks": 1, "archs": ["sm_86", "sm_89", "sm_120a"],
      "cost": {"k_tile": 3000, "fixed": 9000}}]}}]}
*/
