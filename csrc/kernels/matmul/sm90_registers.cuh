// Consumers for TF32 whose A is contiguous along M. wgmma requires K-major TF32 in shared memory
// but not in registers, so the consumers load A to registers. A B that is contiguous along N
// becomes A of the transposed product (kSm90Transposed: out is written with its rows as columns).
//
//   loads: a k block's values, 8 bytes per load (two adjacent rows of M) without bank conflicts,
//     while the previous k block is multiplied
//   epilogue: from registers to memory, two adjacent elements at a time
//
// The assignment of rows to lanes avoids bank conflicts: a warp's 16 rows are two runs of 8, and a
// lane's rows g and g + 8 of wgmma's A are adjacent along M.
#pragma once

#include "common/wgmma_tf32.cuh"
#include "sm90_block.cuh"

namespace torch_cubin {
namespace sm90 {

// The addresses of a lane's values of a k block, and their rows of the tile. The tile is stored in
// panels of 32 rows of M: 128 bytes for each k, with the 128-byte swizzle. The lanes of a
// half-warp, which are served together, read 4 k and 2 pairs of each of two vectors whose numbers
// differ by 4: every bank once.
struct RegisterRows {
  u32 low, high;  // byte offsets in the tile, for k of 0 to 3 and of 4 to 7
  int row;        // the first of the lane's two adjacent rows of the tile

  TC_DEVICE explicit RegisterRows(int warp) {
    const int lane = threadIdx.x % 32, g = lane / 4, k = lane % 4;
    const int panel = warp / 2, vector = warp % 2 * 2 + g / 4 + g / 2 % 2 * 4, half = g % 2;
    const u32 from = panel * 4096 + half * 8;
    low = from + k * 128 + (vector ^ k) * 16;
    high = from + (k + 4) * 128 + (vector ^ (k + 4)) * 16;
    row = panel * 32 + vector * 4 + half * 2;
  }
};

// Loads A's values of a k block of 32: four steps of wgmma.
TC_DEVICE void load_registers(u32 tile, const RegisterRows& rows, u32 (&a)[4][4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(a[k][0]), "=r"(a[k][1])
                 : "r"(tile + rows.low + k * 1024)
                 : "memory");
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(a[k][2]), "=r"(a[k][3])
                 : "r"(tile + rows.high + k * 1024)
                 : "memory");
  }
}

template <class C>
TC_DEVICE void multiply_registers(float (&sum)[C::kTileN / 2], const u32 (&a)[4][4], u64 b,
                                  int add) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    WgmmaTf32Registers<C::kTileN>::run(sum, a[k], advance(b, k * 32), k == 0 ? add : 1);
  }
  wgmma_commit();
}

TC_DEVICE void store_floats(float* to, float first, float second) {
  *reinterpret_cast<float2*>(to) = make_float2(first, second);
}

// Stores the sums, with no epilogue other than the bias of a transposed product. All pairs are
// aligned to 8 bytes, and none is partly outside. m and n: the lane's first row and column.
template <class C>
TC_DEVICE void store_registers(const Sm90MatmulParams& p, const Work& w, int m, int n,
                               const float (&bias)[2], const float (&sum)[C::kTileN / 2]) {
  float* out = static_cast<float*>(p.out) + w.b0 * p.out_batch_stride[0] +
               w.b1 * p.out_batch_stride[1] + w.b2 * p.out_batch_stride[2];
  if (p.flags & kSm90Transposed) {
    if (m >= p.m) return;
    out += n * p.out_stride_m + m;
    const tc_int64 skip = 7 * p.out_stride_m;
#pragma unroll
    for (int j = 0; j < C::kTileN / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (n + 8 * j + c < p.n) {
          store_floats(out, sum[4 * j + c] + bias[0], sum[4 * j + c + 2] + bias[1]);
        }
        out += c == 0 ? p.out_stride_m : skip;
      }
    }
    return;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (m + h >= p.m) return;
    float* row = out + (m + h) * p.out_stride_m + n;
#pragma unroll
    for (int j = 0; j < C::kTileN / 8; ++j) {
      if (n + 8 * j < p.n) store_floats(row + 8 * j, sum[4 * j + 2 * h], sum[4 * j + 2 * h + 1]);
    }
  }
}

// kSm90General: any other epilogue, element by element, in a loop that is not unrolled.
template <class C>
TC_DEVICE void finish_registers(const Sm90MatmulParams& p, const Work& w, int m, int n,
                                const float (&sum)[1][C::kTileN / 2]) {
  const bool transposed = p.flags & kSm90Transposed;
  const int activation = p.flags >> kSm90Activation & 7;
  const tc_int64 step_m = transposed ? 1 : p.out_stride_m, step_n = transposed ? p.out_stride_m : 1;
  float* out = static_cast<float*>(p.out) + w.b0 * p.out_batch_stride[0] +
               w.b1 * p.out_batch_stride[1] + w.b2 * p.out_batch_stride[2];
  const float* addend = static_cast<const float*>(p.addend) + w.b0 * p.addend_batch_stride[0] +
                        w.b1 * p.addend_batch_stride[1] + w.b2 * p.addend_batch_stride[2];
  const auto bias = static_cast<const float*>(p.bias);
#pragma unroll 1
  for (int j = 0; j < C::kTileN / 8; ++j, n += 8) {
    float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    bool exists[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = m + i / 2, column = n + i % 2;
      exists[i] = row < p.m && column < p.n;
      if (bias != nullptr && exists[i]) {
        x[i] = bias[(p.flags & kSm90BiasRow ? row : column) * p.bias_stride];
      }
    }
    take_sums<C, 8, 0, C::kTileN / 8>(j, p.alpha, sum, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = m + i / 2, column = n + i % 2;
      x[i] = activate<true>(x[i], activation, p.curve);
      if (!exists[i]) continue;
      if (p.addend != nullptr) {
        x[i] =
            __fmaf_rn(p.beta, addend[row * p.addend_stride_m + column * p.addend_stride_n], x[i]);
      }
      out[row * step_m + column * step_n] = x[i];
    }
  }
}

// The counterpart of `consume` in sm90.cu.
template <class C>
TC_DEVICE void consume_from_registers(const Sm90MatmulParams& p, u32 shared, u32 full, u32 empty,
                                      const Work* ring, int warp) {
  static_assert(C::kFromRegisters && !C::kBMnMajor && !C::kStreams && C::kBlocksM == 1);
  int stage = 0, number = 0;
  u32 phase = 0;
  const int group = warp / 4;
  const ClusterShape cluster(p.flags);
  // All warps read A, so each warp frees the stage: one lane per block that shares a tile with this
  // one.
  const int source = threadIdx.x % 32;
  const bool frees = source < cluster.sources();
  const u32 target = cluster_rank() ^ cluster.source(source);
  bool leads = C::kConsumers == 2 && group == 0;
  const RegisterRows rows(warp);
  const u64 b0 = wgmma_descriptor(shared + C::kABytes, 8192, 1024);

  if (C::kConsumers == 2 && group == 1) named_sync(kSkewBarrier, 2 * kWarpgroup);
  for (;; ++number) {
    barrier_wait(full + 8 * stage, phase);
    const Work& w = ring[number % C::kRing];
    int k_count = w.k_count;
    if (k_count == 0) break;
    const int m = w.m0 + rows.row, n = w.n0 + threadIdx.x % 4 * 2;
    float bias[2] = {0.0f, 0.0f};
    if ((p.flags & kSm90Finish) && m < p.m) {
      bias[0] = static_cast<const float*>(p.bias)[m];
      bias[1] = static_cast<const float*>(p.bias)[m + 1];
    }
    float sum[1][C::kTileN / 2];
    u32 even[4][4], odd[4][4];
    load_registers(shared + stage * C::kStageBytes, rows, even);
    int add = 0, previous = stage;
    // Multiplies the k block whose A is in `own`, and loads the next block's A to `next`.
    auto step = [&](const u32(&own)[4][4], u32(&next)[4][4]) {
      multiply_registers<C>(sum[0], own, b0 + stage * (C::kStageBytes >> 4), add);
      const int current = stage;
      if (++stage == C::kStages) {
        stage = 0;
        phase ^= 1;
      }
      if (--k_count > 0) {
        wgmma_wait<1>();  // for the previous k block: `next` may be overwritten
        if (add) free_stage(frees, empty + 8 * previous, target);
        barrier_wait(full + 8 * stage, phase);
        load_registers(shared + stage * C::kStageBytes, rows, next);
      } else if (add) {
        wgmma_wait<1>();
        free_stage(frees, empty + 8 * previous, target);
      }
      if (leads) {
        named_arrive(kSkewBarrier, 2 * kWarpgroup);
        leads = false;
      }
      previous = current;
      add = 1;
    };
#pragma unroll 1
    for (;;) {
      step(even, odd);
      if (k_count == 0) break;
      step(odd, even);
      if (k_count == 0) break;
    }
    wgmma_wait<0>();
    keep_in_place(sum[0]);
    free_stage(frees, empty + 8 * previous, target);
    if constexpr (C::kSplitsK) {
      const u32 arrived = empty + 8 * C::kStages;
      if ((p.flags & kSm90OverK) && !exchange<C>(p, warp, shared, arrived, sum)) continue;
    }
    if (p.flags & kSm90General) {
      finish_registers<C>(p, w, m, n, sum);
    } else {
      store_registers<C>(p, w, m, n, bias, sum[0]);
    }
  }
  if (leads) named_arrive(kSkewBarrier, 2 * kWarpgroup);  // there was no tile
}

}  // namespace sm90
}  // namespace torch_cubin
