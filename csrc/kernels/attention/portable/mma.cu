// Attention forward for 16-bit types on tensor cores, after FlashAttention-2 (Dao, 2023), with
// instructions of sm_80 (cp.async, ldmatrix, mma.sync), for every architecture from one source.
//
// A block computes kTileM rows of one head, a warp kWarpRows of them: it keeps their sums, maxima
// and outputs in registers while tiles of kTileN columns of k and v come through a ring of kStages
// stages in shared memory (forward_block.cuh). The accumulators of q . k become the A fragments of
// the second product without leaving their registers; exponentials and mma of a tile's parts are
// interleaved.
//
// `full` kernels (kGeneral false) support lengths and the band, and need scale > 0. `general` ones
// may spill a few bytes, around code that is slow anyway. 128x64x128 from sm_80 to sm_89 spills the
// addresses of its copies: about 13 loads for each tile of keys, which has 256 mma.
#include "forward_block.cuh"
#include "softmax.cuh"

namespace torch_cubin::TC_KERNEL {

struct Config {
  static constexpr DType kDType = DType::TC_DTYPE;
  static constexpr bool kGeneral = TC_GENERAL;
  static constexpr int kTileM = TC_TILE_M, kTileN = TC_TILE_N, kTileK = TC_TILE_K;
  static constexpr int kWarpRows = TC_WARP_ROWS, kStages = TC_STAGES;
  static constexpr int kThreads = TC_THREADS, kMinBlocks = TC_MIN_BLOCKS;
  static constexpr int kDynamicShared = TC_DYNAMIC_SHARED;
};
static_assert(Config::kTileM / Config::kWarpRows * 32 == Config::kThreads,
              "the block must hold the tile's warps");
static_assert(Config::kTileN % 32 == 0, "dropout numbers come for 32 columns");

constexpr DType kDType = Config::kDType;
constexpr bool kGeneral = Config::kGeneral;
constexpr int kRowBytes = Config::kTileK * 2;

struct Attention : ForwardSums<Config::kWarpRows / 16, Config::kTileN / 8, Config::kTileK / 8> {
  using Config = TC_KERNEL::Config;
  using Memory = ForwardMemory<Config, Swizzle<kRowBytes, true>>;
  static_assert(Memory::kBytes == Config::kDynamicShared, "the kernel table's shared memory");
  static constexpr bool kVote = true;
  static constexpr bool kCopyAfterScores = true;
  static constexpr int kGroupRows = Config::kWarpRows;

  FragmentAddress<Fragment::a, kRowBytes> q_address;
  FragmentAddress<Fragment::b, kRowBytes> k_address;
  FragmentAddress<Fragment::b_transposed, kRowBytes> v_address;

  TC_DEVICE Attention(const AttentionParams& p, u32)
      : ForwardSums(kGeneral ? kLog2e : p.scale * kLog2e),
        q_address(group_row()),
        k_address(0),
        v_address(0) {}

  static TC_DEVICE int group_row() { return threadIdx.x / 32 * kGroupRows; }
  static TC_DEVICE int lane_column() { return threadIdx.x % 4 * 2; }

  TC_DEVICE void multiply_qk(u32 q_shared, u32 k_shared) {
    clear_scores();
    constexpr int kInPairs = kScoreTiles / 2;
    constexpr int kSlots = Config::kTileK / 16 * kInPairs;
    u32 q[kBlocks][4], k[2][4];
    k_address.load(k[0], k_shared, 0, 0);
    unrolled<kSlots>([&](auto constant) {
      constexpr int now = decltype(constant)::value, next = now + 1;
      constexpr int step = now / kInPairs, n = now % kInPairs;
      if constexpr (n == 0) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) q_address.load(q[b], q_shared, 16 * b, 16 * step);
      }
      if constexpr (next < kSlots) {
        k_address.load(k[next % 2], k_shared, 16 * (next % kInPairs), 16 * (next / kInPairs));
      }
      const auto& words = k[now % 2];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        mma<kDType>(score[b][2 * n], q[b], words[0], words[1]);
        mma<kDType>(score[b][2 * n + 1], q[b], words[2], words[3]);
      }
    });
  }

  TC_DEVICE void weigh(const AttentionParams&, const Sequence&, int, int) {
    follow_maximum(score, out, sum, reference, unit);
  }

  TC_DEVICE void exponentiate_tile(int n) { exponentiate(score, sum, reference, n, unit); }

  // Weights are computed here, 16 columns at a time, or 32 if dropout may clear some of them.
  TC_DEVICE void multiply_pv(const AttentionParams& p, const Sequence& s, int i, int tile,
                             u32 v_shared) {
    constexpr int kInPairs = kOutTiles / 2;
    constexpr int kDepth = Config::kTileN / 16;
    u32 v[2][4];
    v_address.load(v[0], v_shared, 0, 0);
#pragma unroll
    for (int step = 0; step < kDepth; ++step) {
      u32 weights[kBlocks][4];
      if (!kGeneral || step % 2 == 0) {
        exponentiate_tile(2 * step);
        exponentiate_tile(2 * step + 1);
      }
      if constexpr (kGeneral) {
        if (step % 2 == 0) {
          exponentiate_tile(2 * step + 2);
          exponentiate_tile(2 * step + 3);
          if (p.flags & kAttendDropout) {
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
              drop_weights(score[b], p, s, i + 16 * b, tile * Config::kTileN, 2 * step);
            }
          }
        }
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        pack_fragment<kDType>(weights[b], score[b][2 * step], score[b][2 * step + 1]);
      }
#pragma unroll
      for (int n = 0; n < kInPairs; ++n) {
        int now = step * kInPairs + n, next = now + 1;
        if (next < kDepth * kInPairs) {
          v_address.load(v[next % 2], v_shared, 16 * (next / kInPairs), 16 * (next % kInPairs));
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

  TC_DEVICE void store(const AttentionParams& p, const Sequence& s, int i) const {
    store_rows<kGeneral, kDType>(
        *this, p, s, i,
        [&](const auto& output, auto half, int down, bool exists, int b, float factor) {
          output.template store<decltype(half)::value>(p, down, exists, out[b], factor);
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
  "kind": "forward", "tile": "{t.tile}", "block": ["{t.threads}", 1, 1], "stages": 2,
  "dynamic_shared": "{t.shared}", "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}"},
  "defines": {"TC_DTYPE": "{d.dtype}", "TC_WARP_ROWS": "{t.warp_rows}",
              "TC_MIN_BLOCKS": "{t.blocks}", "TC_GENERAL": "{general}"}, "for": {"d": "f16 bf16"}},
 "kernels": [
  {"name": "mma_attention_{d.short}_full_{t.tile.0}x{t.tile.1}x{t.tile.2}", "takes": ["plain"],
   "archs": "{t.archs}",
   "for": {
    "general": [0],
    "t": [
     ["tile", "warp_rows", "threads", "shared", "blocks", "archs", "k_tile", "fixed"],
     [[128, 32, 256], 16, 256, 131072, 1, ["sm_80"],                     3500, 7000],
     [[64, 32, 256],  16, 128,  98304, 2, ["sm_86", "sm_89", "sm_120a"], 3500, 7000]]}},
  {"name": "mma_attention_{d.short}_full_{t.tile.0}x{t.tile.1}x{t.tile.2}", "takes": ["plain"],
   "accepted_spill": {"sm_80": "{t.spill}", "sm_86": "{t.spill}", "sm_89": "{t.spill}"},
   "for": {
    "general": [0],
    "t": [
     ["tile", "warp_rows", "threads", "shared", "blocks", "spill", "k_tile", "fixed"],
     [[128, 128, 64], 32, 128, 81920, 2,   0, 5600, 5000],
     [[128, 64, 128], 32, 128, 98304, 2, 112, 4700, 5000]]}},
  {"name": "mma_attention_{d.short}_general_{t.tile.0}x{t.tile.1}x{t.tile.2}",
   "takes": ["unmasked", "bool_mask", "added_alone", "added_mask", "float_mask", "sinks", "rule",
             "large_softcap"],
   "accepted_spill": {"sm_80": 16, "sm_86": 16, "sm_89": 16, "sm_100a": 16, "sm_120a": 32},
   "for": {
    "general": [1],
    "t": [
     ["tile", "warp_rows", "threads", "shared", "blocks", "k_tile", "fixed"],
     [[128, 64, 64],  32, 128, 49152, 2, 4000, 5000],
     [[128, 32, 128], 32, 128, 65536, 2, 4000, 7000],
     [[64, 32, 256],  16, 128, 98304, 2, 4000, 7000]]}}]}
*/
