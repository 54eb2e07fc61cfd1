// Sums of A's rows over K, computed beside the product: the bias gradient, when the product is the
// weight gradient. Consumers add A's tiles in shared memory while the tensor cores multiply, so no
// element is read from global memory again.
//
// A tile of 128 x 128 that added every k block would take up to half of its time for it. So the
// first `row_parts` tiles of a row of tiles divide the k blocks: each adds every row_parts-th one,
// and another kernel adds their parts. A is contiguous along M. A thread adds eight rows of every
// 16th k: eight threads read the 64 rows of one k, which are 128 bytes. All orders are fixed.
#pragma once

#include "sm90_schedule.cuh"

namespace torch_cubin {
namespace sm90 {

// A thread's sums: 8 rows of each m64 of its warpgroup.
template <class C>
struct RowSums {
  float sum[C::kBlocksM][8];

  // The number of k blocks of this work item before the first one that this tile adds.
  TC_DEVICE static int until_turn(const Work& w, int of_row, int parts) {
    const int first = w.k_first % parts;
    const int ahead = w.k_step > 0 ? of_row - first : first - of_row;
    return ahead < 0 ? ahead + parts : ahead;
  }

  TC_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
      for (int c = 0; c < 8; ++c) sum[i][c] = 0.0f;
    }
  }

  // Adds one stage. `a`: the warpgroup's rows of A's tile in shared memory.
  TC_DEVICE void add(u32 a) {
    const int thread = threadIdx.x % kWarpgroup, row = thread / 8;
    const u32 at = a + row * 128 + (thread % 8 ^ row % 8) * 16;
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
      for (int j = 0; j < C::kTileK / 16; ++j) {
        u32 x[4];
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(at + i * 8192 + j * 2048));
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          sum[i][2 * c] += DTypeTraits<C::kType>::load(static_cast<u16>(x[c]));
          sum[i][2 * c + 1] += DTypeTraits<C::kType>::load(static_cast<u16>(x[c] >> 16));
        }
      }
    }
  }

  // Adds the threads' sums through `scratch` (one buffer per warp in shared memory, `step` bytes
  // apart). Thread t gets row t % 64 of the warpgroup's m64 number i in total[i]. Called by all
  // threads of the warpgroup.
  TC_DEVICE void reduce(u32 scratch, int step, int group, float (&total)[C::kBlocksM]) {
    const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        float x = sum[i][c];
        x += __shfl_xor_sync(~0u, x, 8);
        x += __shfl_xor_sync(~0u, x, 16);
        if (lane < 8) {
          asm volatile(
              "st.shared.f32 [%0], %1;" ::"r"(scratch + warp * step + i * 256 + (lane * 8 + c) * 4),
              "f"(x)
              : "memory");
        }
      }
    }
    named_sync(kGroupBarrier + group, kWarpgroup);
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
      total[i] = 0.0f;
#pragma unroll
      for (int from = 0; from < 4; ++from) {
        float x;
        asm volatile("ld.shared.f32 %0, [%1];"
                     : "=f"(x)
                     : "r"(scratch + from * step + i * 256 + thread % 64 * 4)
                     : "memory");
        total[i] += x;
      }
    }
    named_sync(kGroupBarrier + group, kWarpgroup);
  }
};

// Stores the totals of `reduce` to row_sums, by the first 64 threads of a warpgroup.
template <class C>
TC_DEVICE void store_row_sums(const Sm90MatmulParams& p, const Work& w, int group, int of_row,
                              const float (&total)[C::kBlocksM]) {
  const int thread = threadIdx.x % kWarpgroup;
  if (thread >= 64) return;
  const int split = p.flags & kSm90SplitK ? w.b0 : 0;
  float* to = p.row_sums + static_cast<tc_int64>(split * p.row_parts + of_row) * p.m;
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) {
    const int m = w.m0 + (group * C::kBlocksM + i) * 64 + thread;
    if (m < p.m) to[m] = total[i];
  }
}

}  // namespace sm90
}  // namespace torch_cubin
