// Attention forward for 16-bit types and head_dim up to 256, where mma.cu is bound by
// shared memory: a warp's outputs fill its registers at 16 rows, and each fragment of k and v
// serves 16 rows only. Here two warps share 32 rows:
//
//   scores: each multiplies q with its half of a tile's columns of k,
//   weights: they exchange them through shared memory, as fragments,
//   outputs: each keeps half of head_dim_v, for all columns of the tile.
//
// So each fragment serves 32 rows. Both must use the same references (softmax.cuh): they
// write weights with the old ones first, and a barrier of the pair tells whether a score of either
// exceeds them; only then maxima are exchanged and the weights made again.
//
// Knows lengths and the band; needs scale > 0. Otherwise as mma.cu, which see.
#include "epilogue.cuh"
#include "score.cuh"
#include "softmax.cuh"

namespace torch_cubin {

constexpr DType kDType = DType::TC_DTYPE;
using Traits = DTypeTraits<kDType>;
using Storage = Traits::Storage;
constexpr int kRowBytes = TC_TILE_K * 2;
constexpr int kPairs = TC_TILE_M / 32;
constexpr int kHalfN = TC_TILE_N / 2;  // columns of a warp's scores
constexpr int kHalfK = TC_TILE_K / 2;  // columns of its outputs
constexpr int kScoreTiles = kHalfN / 8;
constexpr int kOutTiles = kHalfK / 8;
constexpr int kFragments = kHalfN / 16;  // of weights, of 16 rows
static_assert(kPairs * 64 == TC_THREADS, "two warps for 32 rows");

using QCopy = RowCopy<TC_TILE_M, kRowBytes, TC_THREADS>;
using KvCopy = RowCopy<TC_TILE_N, kRowBytes, TC_THREADS>;
constexpr int kTileBytes = TC_TILE_N * kRowBytes;
using Ring = KvRing<KvCopy, KvCopy, TC_TILE_N, kTileBytes, TC_STAGES>;
constexpr int kQOffset = TC_STAGES * Ring::kStageBytes;
constexpr int kWeightsOffset = kQOffset + TC_TILE_M * kRowBytes;
constexpr int kWarpWeights = 2 * kFragments * 512;        // bytes
constexpr int kWeightsBytes = 2 * kPairs * kWarpWeights;  // of a tile; two tiles alternate
static_assert(kWeightsOffset + 2 * kWeightsBytes == TC_DYNAMIC_SHARED, "the kernel table's memory");

// A barrier of a pair of warps; whether `value` is true in any of their threads.
TC_DEVICE bool pair_any(int pair, bool value) {
  u32 any;
  asm volatile(
      "{ .reg .pred in, out; setp.ne.u32 in, %1, 0; bar.red.or.pred out, %2, 64, in;"
      " selp.u32 %0, 1, 0, out; }"
      : "=r"(any)
      : "r"(static_cast<u32>(value)), "r"(pair + 1)
      : "memory");
  return any != 0;
}

struct Attention {
  float out[2][kOutTiles][4];
  float score[2][kScoreTiles][4];
  float reference[2][2], sum[2][2];
  u32 weights[kFragments][2][4];
  FragmentAddress<Fragment::a, kRowBytes> q_address;
  FragmentAddress<Fragment::b, kRowBytes> k_address;
  FragmentAddress<Fragment::b_transposed, kRowBytes> v_address;

  TC_DEVICE Attention(int pair, int side)
      : q_address(32 * pair), k_address(kHalfN * side), v_address(0, kHalfK * side) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
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
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) score[b][n][e] = 0.0f;
#pragma unroll
    for (int step = 0; step < TC_TILE_K / 16; ++step) {
      u32 q[2][4];
#pragma unroll
      for (int b = 0; b < 2; ++b) q_address.load(q[b], q_shared, 16 * b, 16 * step);
#pragma unroll
      for (int n = 0; n < kScoreTiles / 2; ++n) {
        u32 k[4];
        k_address.load(k, k_shared, 16 * n, 16 * step);
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          mma<kDType>(score[b][2 * n], q[b], k[0], k[1]);
          mma<kDType>(score[b][2 * n + 1], q[b], k[2], k[3]);
        }
      }
    }
  }

  // Weights of the scores to registers and to `shared`; their sums to `tile_sum`.
  TC_DEVICE void make_weights(float (&tile_sum)[2][2], u32 shared, float unit) {
#pragma unroll
    for (int b = 0; b < 2; ++b) tile_sum[b][0] = tile_sum[b][1] = 0.0f;
#pragma unroll
    for (int f = 0; f < kFragments; ++f)
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        float weight[2][4];
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            weight[n][e] = exp2_approx(fmaf(score[b][2 * f + n][e], unit, -reference[b][e / 2]));
            tile_sum[b][e / 2] += weight[n][e];
          }
        pack_fragment<kDType>(weights[f][b], weight[0], weight[1]);
        store_shared(shared + (2 * f + b) * 512, weights[f][b]);
      }
  }

  // out += weights of kHalfN columns . v, whose rows start at v_shared
  TC_DEVICE void multiply_pv(u32 v_shared) {
#pragma unroll
    for (int f = 0; f < kFragments; ++f)
#pragma unroll
      for (int n = 0; n < kOutTiles / 2; ++n) {
        u32 v[4];
        v_address.load(v, v_shared, 16 * f, 16 * n);
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          mma<kDType>(out[b][2 * n], weights[f][b], v[0], v[1]);
          mma<kDType>(out[b][2 * n + 1], weights[f][b], v[2], v[3]);
        }
      }
  }
};

}  // namespace torch_cubin

extern "C" __global__ void __launch_bounds__(TC_THREADS, 1)
    TC_KERNEL(const __grid_constant__ torch_cubin::AttentionParams p) {
  using namespace torch_cubin;
  wait_for_previous_kernel();
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ Work kept;
  __shared__ float exchange[kPairs][2][32];  // maxima or sums of a warp's rows
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

  int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  int pair = warp / 2, side = warp % 2;
  u32 pair_weights = shared + kWeightsOffset + 2 * pair * kWarpWeights + lane * 16;
  int i = row + 32 * pair + lane / 4;
  float unit = p.scale * kLog2e;
  Attention attention(pair, side);
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
    // A pair whose rows see nothing of the tile has no mma to do.
    int pair_row = row + 32 * pair;
    bool seen =
        whole || (column < pair_row + 32 + s.last && column + TC_TILE_N > pair_row + s.first);
    if (seen) attention.multiply_qk(shared + kQOffset, read);
    if (tile == tiles.end - 1) {
      cp_async_wait<TC_STAGES - 2>();  // v
      __syncthreads();
    }
    ring.copy_next(tile, tiles.begin, read);
    if (seen) {
      if (!whole) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          hide_outside(attention.score[b], s, i + 16 * b, column + kHalfN * side + lane % 4 * 2);
        }
      }
      float most[2][2];
      bool exceeds = false;
#pragma unroll
      for (int b = 0; b < 2; ++b)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const auto& tiles = attention.score[b];
          most[b][h] = fmaxf(tiles[0][2 * h], tiles[0][2 * h + 1]);
#pragma unroll
          for (int n = 1; n < kScoreTiles; ++n) {
            most[b][h] = fmaxf(most[b][h], fmaxf(tiles[n][2 * h], tiles[n][2 * h + 1]));
          }
          exceeds |= fmaf(most[b][h], unit, -attention.reference[b][h]) > kSlack;
        }
      // Tiles alternate between two places, so that a warp may write while its partner reads.
      u32 place = pair_weights + tile % 2 * kWeightsBytes;
      float tile_sum[2][2];
      attention.make_weights(tile_sum, place + side * kWarpWeights, unit);
      if (pair_any(pair, exceeds)) {
#pragma unroll
        for (int b = 0; b < 2; ++b)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            most[b][h] = quad_max(most[b][h]) * unit;
            if (lane % 4 == 0) exchange[pair][side][lane / 4 + 16 * b + 8 * h] = most[b][h];
          }
        pair_any(pair, true);
#pragma unroll
        for (int b = 0; b < 2; ++b)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float other = exchange[pair][1 - side][lane / 4 + 16 * b + 8 * h];
            float moved = fmaxf(attention.reference[b][h], fmaxf(most[b][h], other));
            float factor = exp2_approx(attention.reference[b][h] - moved);
            attention.reference[b][h] = moved;
            attention.sum[b][h] *= factor;
#pragma unroll
            for (int n = 0; n < kOutTiles; ++n) {
              attention.out[b][n][2 * h] *= factor;
              attention.out[b][n][2 * h + 1] *= factor;
            }
          }
        attention.make_weights(tile_sum, place + side * kWarpWeights, unit);
        pair_any(pair, true);
      }
#pragma unroll
      for (int b = 0; b < 2; ++b)
#pragma unroll
        for (int h = 0; h < 2; ++h) attention.sum[b][h] += tile_sum[b][h];
      u32 v_shared = read + kTileBytes;
      attention.multiply_pv(v_shared + side * (kHalfN * kRowBytes));
#pragma unroll
      for (int f = 0; f < kFragments; ++f)
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          load_shared(attention.weights[f][b],
                      place + (1 - side) * kWarpWeights + (2 * f + b) * 512);
        }
      attention.multiply_pv(v_shared + (1 - side) * (kHalfN * kRowBytes));
    }
    read = ring.next(read);
  }

  // Read and computed again: registers that keep these through the loop are dearer.
  __syncthreads();
  work = kept;
  s = Sequence(p, work.batch, work.head);
  i = work.tile * TC_TILE_M + 32 * pair + lane / 4;
#pragma unroll
  for (int b = 0; b < 2; ++b)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      attention.sum[b][h] = quad_sum(attention.sum[b][h]);
      if (lane % 4 == 0) exchange[pair][side][lane / 4 + 16 * b + 8 * h] = attention.sum[b][h];
    }
  __syncthreads();
  RowOutput<kDType> output(p, s, i);
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    unrolled<2>([&](auto half) {
      constexpr int h = decltype(half)::value;
      int down = 16 * b + 8 * h;
      bool exists = i + down < s.rows;
      float sum = exchange[pair][0][lane / 4 + down] + exchange[pair][1][lane / 4 + down];
      float factor = output.finish_joined(p, s.head, down, exists && side == 0 && lane % 4 == 0,
                                          attention.reference[b][h] * kLn2, sum);
      output.store<h>(p, down, exists, attention.out[b], factor, kHalfK * side);
    });
  }
}
/* torch_cubin kernels
{"virtual_arch": [80, 90],
 "kernels": [
  {"name": "pair_attention_{d.short}_full_128x64x256", "kind": "mma", "layout": "full",
   "for": {
    "d": [{"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"}]},
   "dtype": "{d.dtype}", "math": "{d.dtype}", "alignment": 16, "tile": [128, 64, 256], "stages": 2,
   "block": [256, 1, 1], "dynamic_shared": 229376, "archs": ["sm_90a", "sm_100a"],
   "defines": {"TC_DTYPE": "{d.dtype}"}, "cost": {"k_tile": 5300, "fixed": 8000}}]}
*/
