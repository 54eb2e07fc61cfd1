// Attention forward for float32 on tensor cores, each product as three of TF32
// (tf32x3_product.cuh). Otherwise like mma.cu.
//
// Key 8 n + 2 t of a tile is column t of an A fragment of weights, key 8 n + 2 t + 1 column t + 4:
// so the accumulators of q . k are A fragments without leaving their lanes. The columns of the
// outputs are permuted too: n8 tile 4 q + j holds columns 32 q + 4 g + j, so that a lane reads v
// and writes out in vectors of 16 bytes.
//
// The spills that the table accepts are a few scalars of a tile, for warps with 32 rows.
#include "forward_block.cuh"
#include "softmax.cuh"
#include "tf32x3_product.cuh"

namespace torch_cubin::TC_KERNEL {

struct Config {
  static constexpr DType kDType = DType::float32;
  static constexpr bool kGeneral = TC_GENERAL;
  static constexpr int kTileM = TC_TILE_M, kTileN = TC_TILE_N, kTileK = TC_TILE_K;
  static constexpr int kWarpRows = TC_WARP_ROWS, kStages = TC_STAGES;
  static constexpr int kThreads = TC_THREADS, kMinBlocks = TC_MIN_BLOCKS;
  static constexpr int kDynamicShared = TC_DYNAMIC_SHARED;
};
static_assert(Config::kTileM / Config::kWarpRows * 32 == Config::kThreads,
              "the block must hold the tile's warps");

constexpr bool kGeneral = Config::kGeneral;
constexpr int kRowBytes = Config::kTileK * 4;

// For reads of 16 bytes from 4 even (or odd) rows by 2 adjacent vectors each: see multiply_pv.
struct PairSwizzle {
  static TC_DEVICE int offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ (row & 6)) << 4);
  }
};

// Row `down` below: elements 2 kHalf and 2 kHalf + 1 of all tiles.
template <int kHalf, int kTiles>
TC_DEVICE void store_row(const AttentionParams& p, const RowOutput<DType::float32>& output,
                         int down, bool exists, const float (&sum)[kTiles][4], float factor) {
  float* to =
      p.splits > 1 ? output.partial_out + down * p.head_dim_v : output.out + down * p.out_stride[2];
#pragma unroll
  for (int q = 0; q < kTiles / 4; ++q)
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

struct Attention : ForwardSums<Config::kWarpRows / 16, Config::kTileN / 8, Config::kTileK / 8> {
  using Config = TC_KERNEL::Config;
  using Memory = ForwardMemory<Config, PairSwizzle>;
  static_assert(Memory::kBytes == Config::kDynamicShared, "the kernel table's shared memory");
  static constexpr bool kVote = true;
  static constexpr bool kCopyAfterScores = false;
  static constexpr int kGroupRows = Config::kWarpRows;

  FragmentAddress<Fragment::a, kRowBytes> q_address;
  FragmentAddress<Fragment::b, kRowBytes> k_address;

  TC_DEVICE Attention(const AttentionParams& p, u32)
      : ForwardSums(kGeneral ? kLog2e : p.scale * kLog2e), q_address(group_row()), k_address(0) {}

  static TC_DEVICE int group_row() { return threadIdx.x / 32 * kGroupRows; }
  static TC_DEVICE int lane_column() { return threadIdx.x % 4 * 2; }

  TC_DEVICE void multiply_qk(u32 q_shared, u32 k_shared) {
    clear_scores();
#pragma unroll 1  // unrolled, it needs too many registers
    for (int quad = 0; quad < Config::kTileK / 32; ++quad, q_shared += 128, k_shared += 128)
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

  TC_DEVICE void weigh(const AttentionParams& p, const Sequence& s, int i, int tile) {
    follow_maximum(score, out, sum, reference, unit);
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) exponentiate(score, sum, reference, n, unit);
    if (kGeneral && (p.flags & kAttendDropout)) {
#pragma unroll
      for (int n = 0; n < kScoreTiles; n += 4)
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          drop_weights(score[b], p, s, i + 16 * b, tile * Config::kTileN, n);
        }
    }
  }

  TC_DEVICE void multiply_pv(const AttentionParams&, const Sequence&, int, int, u32 v_shared) {
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

  TC_DEVICE void store(const AttentionParams& p, const Sequence& s, int i) const {
    store_rows<kGeneral, DType::float32>(
        *this, p, s, i,
        [&](const auto& output, auto half, int down, bool exists, int b, float factor) {
          store_row<decltype(half)::value>(p, output, down, exists, out[b], factor);
        });
  }
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    TC_KERNEL(const __grid_constant__ AttentionParams p) {
  wait_for_previous_kernel();
  run_forward<Attention>(p);
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"defaults": {
  "name": "tf32x3_attention_{l.layout}_{t.tile.0}x{t.tile.1}x{t.tile.2}", "kind": "forward",
  "dtype": "float32", "math": "float32", "takes": "{takes.{l.layout}}", "tile": "{t.tile}",
  "block": ["{t.threads}", 1, 1], "stages": 2, "dynamic_shared": "{t.shared}",
  "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}"},
  "defines": {"TC_GENERAL": "{l.general}", "TC_WARP_ROWS": "{t.rows}",
              "TC_MIN_BLOCKS": "{t.blocks}"},
  "for": {
   "takes": [{
    "full": ["plain"],
    "general": ["unmasked", "bool_mask", "added_alone", "added_mask", "float_mask", "sinks", "rule",
                "large_softcap"]}]}},
 "kernels": [
  {"accepted_spill": {"sm_80": 64, "sm_86": 64, "sm_89": 64, "sm_90a": 64, "sm_100a": 64,
                      "sm_120a": 64},
   "for": {
    "l": [{"layout": "full", "general": 0}],
    "t": [
     ["tile", "rows", "threads", "shared", "blocks", "k_tile", "fixed"],
     [[128, 32, 64], 32, 128, 65536, 2, 7600, 6000]]}},
  {"for": {
    "l": [{"layout": "general", "general": 1}],
    "t": [
     ["tile", "rows", "threads", "shared", "blocks", "k_tile", "fixed"],
     [[64, 32, 64], 16, 128, 49152, 2, 5000, 6000]]}},
  {"for": {
    "l": [{"layout": "full", "general": 0}, {"layout": "general", "general": 1}],
    "t": [
     ["tile", "rows", "threads", "shared", "blocks", "k_tile", "fixed"],
     [[64, 32, 128], 16, 128, 98304, 2, 7500, 8000]]}},
  {"archs": "{t.archs}",
   "for": {
    "l": [{"layout": "full", "general": 0}, {"layout": "general", "general": 1}],
    "t": [
     ["tile", "rows", "threads", "shared", "blocks", "archs", "k_tile", "fixed"],
     [[128, 16, 256], 16, 256, 196608, 1, ["sm_90a", "sm_100a"],         8000, 9000],
     [[64, 16, 256],  16, 128, 131072, 1, ["sm_80"],                     5000, 9000],
     [[32, 16, 256],  16,  64,  98304, 1, ["sm_86", "sm_89", "sm_120a"], 3000, 9000]]}}]}
*/
