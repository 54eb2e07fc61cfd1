// Attention forward for 16-bit types and head_dim up to 256, where mma.cu is bound by shared
// memory: a warp's outputs fill its registers at 16 rows, and each fragment of k and v serves 16
// rows only. Here two warps share 32 rows:
//
//   scores: each multiplies q with its half of a tile's columns of k,
//   weights: they exchange them through shared memory, as fragments,
//   outputs: each keeps half of head_dim_v, for all columns of the tile.
//
// So each fragment serves 32 rows. Both must use the same references (softmax.cuh): they write
// weights with the old ones first, and a barrier of the pair reports whether a score of either
// exceeds them; only then are maxima exchanged and the weights computed again.
//
// Supports lengths and the band; needs scale > 0. Otherwise like mma.cu.
#include "forward_block.cuh"
#include "softmax.cuh"

namespace torch_cubin::TC_KERNEL {

struct Config {
  static constexpr DType kDType = DType::TC_DTYPE;
  static constexpr bool kGeneral = false;
  static constexpr int kTileM = TC_TILE_M, kTileN = TC_TILE_N, kTileK = TC_TILE_K;
  static constexpr int kStages = TC_STAGES, kThreads = TC_THREADS;
  static constexpr int kDynamicShared = TC_DYNAMIC_SHARED;
};

constexpr DType kDType = Config::kDType;
constexpr int kRowBytes = Config::kTileK * 2;
constexpr int kInPairs = Config::kTileM / 32;
constexpr int kHalfN = Config::kTileN / 2;  // columns of a warp's scores
constexpr int kHalfK = Config::kTileK / 2;  // columns of its outputs
constexpr int kFragments = kHalfN / 16;     // of weights, of 16 rows
static_assert(kInPairs * 64 == Config::kThreads, "two warps for 32 rows");

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

struct Attention : ForwardSums<2, kHalfN / 8, kHalfK / 8> {
  using Config = TC_KERNEL::Config;
  using Memory = ForwardMemory<Config, Swizzle<kRowBytes, true>>;
  static constexpr int kWarpWeights = 2 * kFragments * 512;  // bytes
  static constexpr int kWeightsBytes =
      2 * kInPairs * kWarpWeights;  // of a tile; two tiles alternate
  static_assert(Memory::kBytes + 2 * kWeightsBytes == Config::kDynamicShared,
                "the kernel table's memory");
  static constexpr bool kVote = false;
  static constexpr bool kCopyAfterScores = true;
  static constexpr int kGroupRows = 32;

  int pair, side;
  u32 pair_weights;  // this lane's, of the pair, in shared memory
  u32 weights[kFragments][2][4];
  FragmentAddress<Fragment::a, kRowBytes> q_address;
  FragmentAddress<Fragment::b, kRowBytes> k_address;
  FragmentAddress<Fragment::b_transposed, kRowBytes> v_address;

  TC_DEVICE Attention(const AttentionParams& p, u32 shared)
      : Attention(p, shared, uniform(threadIdx.x / 32)) {}
  TC_DEVICE Attention(const AttentionParams& p, u32 shared, int warp)
      : ForwardSums(p.scale * kLog2e),
        pair(warp / 2),
        side(warp % 2),
        pair_weights(shared + Memory::kBytes + 2 * pair * kWarpWeights + threadIdx.x % 32 * 16),
        q_address(32 * pair),
        k_address(kHalfN * side),
        v_address(0, kHalfK * side) {}

  TC_DEVICE int group_row() const { return 32 * pair; }
  TC_DEVICE int lane_column() const { return kHalfN * side + threadIdx.x % 4 * 2; }
  static TC_DEVICE int pair_row(int b, int h) { return threadIdx.x % 32 / 4 + 16 * b + 8 * h; }

  // A warp's maximum or sum of a row, for its partner.
  static TC_DEVICE float& exchanged(int pair, int side, int row) {
    __shared__ float numbers[kInPairs][2][32];
    return numbers[pair][side][row];
  }

  TC_DEVICE void multiply_qk(u32 q_shared, u32 k_shared) {
    clear_scores();
#pragma unroll
    for (int step = 0; step < Config::kTileK / 16; ++step) {
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

  // Writes weights of the scores to registers and to `shared`; their sums to `tile_sum`.
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
            weight[n][e] = exp2_approx((score[b][2 * f + n][e] - reference[b][e / 2]) * unit);
            tile_sum[b][e / 2] += weight[n][e];
          }
        pack_fragment<kDType>(weights[f][b], weight[0], weight[1]);
        store_shared(shared + (2 * f + b) * 512, weights[f][b]);
      }
  }

  // Tiles alternate between two buffers, so that a warp may write while its partner reads.
  TC_DEVICE u32 place(int tile) const { return pair_weights + tile % 2 * kWeightsBytes; }

  TC_DEVICE void weigh(const AttentionParams&, const Sequence&, int, int tile) {
    float most[2][2];
    bool exceeds = false;
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto& tiles = score[b];
        most[b][h] = fmaxf(tiles[0][2 * h], tiles[0][2 * h + 1]);
#pragma unroll
        for (int n = 1; n < kScoreTiles; ++n) {
          most[b][h] = fmaxf(most[b][h], fmaxf(tiles[n][2 * h], tiles[n][2 * h + 1]));
        }
        exceeds |= (most[b][h] - reference[b][h]) * unit > kSlack;
      }
    u32 mine = place(tile) + side * kWarpWeights;
    float tile_sum[2][2];
    make_weights(tile_sum, mine, unit);
    if (pair_any(pair, exceeds)) {
#pragma unroll
      for (int b = 0; b < 2; ++b)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          most[b][h] = quad_max(most[b][h]);
          if (threadIdx.x % 4 == 0) exchanged(pair, side, pair_row(b, h)) = most[b][h];
        }
      pair_any(pair, true);
#pragma unroll
      for (int b = 0; b < 2; ++b)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float other = exchanged(pair, 1 - side, pair_row(b, h));
          float moved = fmaxf(reference[b][h], fmaxf(most[b][h], other));
          float factor = exp2_approx((reference[b][h] - moved) * unit);
          reference[b][h] = moved;
          sum[b][h] *= factor;
#pragma unroll
          for (int n = 0; n < kOutTiles; ++n) {
            out[b][n][2 * h] *= factor;
            out[b][n][2 * h + 1] *= factor;
          }
        }
      make_weights(tile_sum, mine, unit);
      pair_any(pair, true);
    }
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[b][h] += tile_sum[b][h];
  }

  // out += weights of kHalfN columns . v, whose rows start at v_shared
  TC_DEVICE void multiply_half(u32 v_shared) {
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

  // This warp's columns first, then those of its partner.
  TC_DEVICE void multiply_pv(const AttentionParams&, const Sequence&, int, int tile, u32 v_shared) {
    multiply_half(v_shared + side * (kHalfN * kRowBytes));
#pragma unroll
    for (int f = 0; f < kFragments; ++f)
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        load_shared(weights[f][b], place(tile) + (1 - side) * kWarpWeights + (2 * f + b) * 512);
      }
    multiply_half(v_shared + (1 - side) * (kHalfN * kRowBytes));
  }

  TC_DEVICE void store(const AttentionParams& p, const Sequence& s, int i) {
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[b][h] = quad_sum(sum[b][h]);
        if (threadIdx.x % 4 == 0) exchanged(pair, side, pair_row(b, h)) = sum[b][h];
      }
    __syncthreads();
    RowOutput<kDType> output(p, s, i);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      unrolled<2>([&](auto half) {
        constexpr int h = decltype(half)::value;
        int down = 16 * b + 8 * h;
        bool exists = i + down < s.rows;
        float both = exchanged(pair, 0, pair_row(b, h)) + exchanged(pair, 1, pair_row(b, h));
        float factor =
            output.finish_joined(p, s.head, down, exists && side == 0 && threadIdx.x % 4 == 0,
                                 reference[b][h] * p.scale, both);
        output.store<h>(p, down, exists, out[b], factor, kHalfK * side);
      });
    }
  }
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1)
    TC_KERNEL(const __grid_constant__ AttentionParams p) {
  wait_for_previous_kernel();
  run_forward<Attention>(p);
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"kernels": [
  {"name": "pair_attention_{d.short}_full_128x64x256", "kind": "forward", "takes": ["plain"],
   "tile": [128, 64, 256], "block": [256, 1, 1], "stages": 2, "dynamic_shared": 229376,
   "archs": ["sm_90a", "sm_100a"], "cost": {"k_tile": 5300, "fixed": 8000},
   "defines": {"TC_DTYPE": "{d.dtype}"}, "for": {"d": "f16 bf16"}}]}
*/
