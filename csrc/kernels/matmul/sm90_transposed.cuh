// Stores a tile transposed: the kernel's M is then out's contiguous dim. So a tile of 128 x 192 is
// one of 192 x 128, too, for products whose operands the host has swapped.
#pragma once

#include "sm90_schedule.cuh"

namespace torch_cubin {
namespace sm90 {

// A Config with one more optional feature: storing its tiles transposed.
template <class Tile, bool kSwapsValue>
struct Swapping : Tile {
  static constexpr bool kSwaps = kSwapsValue;
};

// stmatrix (common/hopper.cuh) of the transposed matrices.
TC_DEVICE void stmatrix_transposed(u32 shared, u32 a, u32 b, u32 c, u32 d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

// The bias of the two rows that a lane has of each 64; without a bias -0, which changes no sum.
template <class C>
TC_DEVICE void load_bias_of_rows(const Sm90MatmulParams& p, int m, float (&bias)[C::kBlocksM][2]) {
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m + 64 * i + 8 * half + threadIdx.x % 32 / 4;
      bias[i][half] = -0.0f;
      if (p.bias != nullptr && row < p.m) {
        bias[i][half] =
            DTypeTraits<C::kType>::load(static_cast<const u16*>(p.bias)[row * p.bias_stride]);
      }
    }
  }
}

// Stores the warpgroup's rows of a tile, m0 being its first. The four warps write panels of 64
// columns of out (128 bytes, swizzled) together, and one thread stores them by the TMA. `staging`
// is the warpgroup's; `turn` its next buffer, which is free.
template <class C>
TC_DEVICE void store_transposed(const Sm90MatmulParams& p, u32 staging, int group, int& turn,
                                int m0, const Work& w, const float (&bias)[C::kBlocksM][2],
                                const float (&sum)[C::kBlocksM][C::kTileN / 2]) {
  constexpr int kRows = C::kTileN % 32 == 0 ? 32 : 16;  // of out, in a panel
  constexpr int kBuffers = 4 * C::kWarpBytes / (128 * kRows);
  static_assert(kBuffers >= 2, "a panel is written while another one is stored");
  using Traits = DTypeTraits<C::kType>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const bool stores = threadIdx.x % kWarpgroup == 0;
  // Lanes 8j..8j+7 address matrix j: the warp's first 8 columns of out and the other 8, in 8 rows,
  // then in the next 8.
  const u32 own = (lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
    for (int panel = 0; panel < C::kTileN / kRows; ++panel) {
      const u32 buffer = staging + turn * (128 * kRows);
      turn = turn + 1 == kBuffers ? 0 : turn + 1;
#pragma unroll
      for (int j = 0; j < kRows / 16; ++j) {
        const float* s = sum[i] + panel * (kRows / 2) + 8 * j;
        stmatrix_transposed(buffer + own + j * (16 * 128),
                            Traits::pack(s[0] + bias[i][0], s[1] + bias[i][0]),
                            Traits::pack(s[2] + bias[i][1], s[3] + bias[i][1]),
                            Traits::pack(s[4] + bias[i][0], s[5] + bias[i][0]),
                            Traits::pack(s[6] + bias[i][1], s[7] + bias[i][1]));
      }
      fence_async_proxy();
      if (stores) tma_store_wait_read<kBuffers - 2>();  // the next buffer is free
      named_sync(kGroupBarrier + group, kWarpgroup);
      if (!stores) continue;
      const int m = m0 + 64 * i, n = w.n0 + panel * kRows;
      const u64 hint = p.flags & kSm90KeepOut ? kEvictNormal : kEvictFirst;
      if (m < p.m && n < p.n) {
        if (p.flags & kSm90Batched) {
          tma_store(&p.out_map, buffer, m, n, w.b0, w.b1, w.b2, hint);
        } else {
          tma_store(&p.out_map, buffer, m, n, hint);
        }
      }
      tma_store_commit();
    }
  }
}

}  // namespace sm90
}  // namespace torch_cubin
