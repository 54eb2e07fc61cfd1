// The warpgroup of dq of sm90/e4m3_backward.cu. It has time to spare, in which it makes what wgmma
// needs beside what the TMA loads: the keys as columns of keys, and, with C::kWidens, q in
// bfloat16. A kernel before it would read and write memory for either.
#pragma once

#include "backward_block.cuh"
#include "e4m3_backward_numbers.cuh"

namespace torch_cubin {
namespace sm90 {

// dq, transposed, of 64 columns: k^T dS^T.
template <class C>
struct DqOfBytes {
  template <int kBegin = 0, int kEnd = C::kWorkKeys>
  static TC_DEVICE void multiply(float (&dq)[C::kRows / 2], u32 shared, u32 scores, int piece,
                                 PairPlace) {
    const u64 high = k_major_descriptor<128>(0);
    u32 keys = descriptor_low<C>(shared + C::kTurned + piece * (64 * C::kKeys));
    u32 ds = descriptor_low<C>(scores);
    wgmma_fence();
#pragma unroll
    for (int k = kBegin / 32; k < kEnd / 32; ++k) {
      u64 b = C::kPair ? descriptor(without_swizzle(C::kChunkBytes), ds, 2 * k * C::kChunkBytes)
                       : descriptor(high, ds, 32 * k);
      WgmmaBytes<C::kRows>::by_e5m2(
          dq, descriptor(high, keys, k / 4 * (64 * C::kKeys) + 32 * (k % 4)), b, k > kBegin / 32);
    }
    wgmma_commit();
  }

 private:
  // Of a K-major operand whose rows' next 16 bytes are `bytes` further.
  static constexpr TC_DEVICE u64 without_swizzle(u32 bytes) {
    return (u64(8 * 16 >> 4) << 32) | (u64(bytes >> 4) << 16);
  }
};

// What a thread converts at a time: 16 columns of a row. Lanes l and l + 4 have rows of which the
// swizzles of both kinds of rows are in different banks.
template <class C>
struct Sixteen {
  int row, panel, part;  // columns 64 panel + 16 part

  TC_DEVICE explicit Sixteen(int index) {
    int lane = threadIdx.x % 32;
    panel = index % C::kPanels;
    row = index / C::kPanels * 8 + (lane / 8 ^ (lane / 4 % 2 * 5));
    part = lane % 4;
  }
  // Bytes from the begin of the rows.
  TC_DEVICE u32 in_bytes() const {
    int place = C::kD == 128 ? (4 * panel + part) ^ row % 8 : part ^ row / 2 % 4;
    return row * C::kD + place * 16;
  }
  TC_DEVICE u32 in_words(int half) const {
    return panel * (C::kRows * 128) + row * 128 + ((2 * part + half) ^ row % 8) * 16;
  }
};

// For Queries: dq, and these conversions.
template <class C>
struct DqAndConversions : DqOfBytes<C> {
  static constexpr int kEach = C::kRows / 8 * C::kPanels / 4;  // of Sixteen
  static constexpr int kTurnBarrier = 4;                       // a named one

  static TC_DEVICE void begin_item(u32 shared, u32 step, u32 end) {
    if (step != end) widen(shared, step);
  }
  static TC_DEVICE void begin_keys(u32 shared) { turn_keys(shared); }
  // Before dq, which may wait for its turn: the other warpgroups wait for this.
  static TC_DEVICE void begin_step(u32 shared, u32 step, u32 end) {
    if (step + 1 != end) widen(shared, step + 1);
  }

 private:
  static TC_DEVICE int lane() { return threadIdx.x % 32; }
  static TC_DEVICE int warp() { return threadIdx.x / 32 % 4; }

  // q of a step in bfloat16, times its rows' factors, which rounds nothing.
  static TC_DEVICE void widen(u32 shared, u32 step) {
    if constexpr (!C::kWidens) return;
    u32 q = slot<C::kQStages>(step);
    barrier_wait(shared + C::kQFull + 8 * q, phase<C::kQStages>(step));
    u32 factors = shared + C::kSums + q * C::kSumBytes + 2 * C::kRows * 4;
    u32 from = shared + C::kQInBytes + q * C::kByteRows, to = shared + C::kQ + q * C::kQBytes;
    u32 bytes[kEach][4], bits[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      Sixteen<C> at(warp() + 4 * i);
      load_shared(bits[i], factors + 4 * at.row);
      load_shared(bytes[i], from + at.in_bytes());
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      Sixteen<C> at(warp() + 4 * i);
      // The inverse of a power of two; of a row that is not finite, 1.
      float factor = bits[i] == kNaN ? 1.0f : __uint_as_float(0x7f000000 - bits[i]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 wide[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float2 two = unpack_e4m3(bytes[i][2 * half + j / 2] >> (16 * (j % 2)));
          wide[j] = pack_bf16(two.x * factor, two.y * factor);
        }
        store_shared(to + at.in_words(half), wide);
      }
    }
    fence_async_proxy();
    release_in_warp(shared + C::kWideFull + 8 * q);
  }

  // The work item's keys as (column, key), of each 16 the first and the last 8 interleaved: like
  // transpose_values() of sm90/e4m3_values.cuh.
  static TC_DEVICE void turn_keys(u32 shared) {
    constexpr int kColumns = C::kPieces * 16;  // of a warp
    u32 swizzle = lane() % 8 * C::kD / 128 * 16;
    int column = lane() % 8 * 2 + (lane() / 8 + lane() % 8 / 4) % 2;
    u32 place = (column % 8) ^ (lane() / 16);
    u32 first = lane() < 16 ? 0x6240 : 0x7351, second = first ^ 0x1111;
    u32 from = shared + C::kK + lane() * C::kD;
    u32 to = shared + C::kTurned + column * C::kKeys;
#pragma unroll 2
    for (int i = 0; i < kColumns / 16 * (C::kWorkKeys / 32); ++i) {
      u32 at = warp() * kColumns + i / 4 * 16, column = at, keys = from, x[4];
      if constexpr (C::kPair) {  // half of the columns, of the first block's keys, and the second's
        at = warp() * 16 + i / 4 * 64;
        column = warp() * 16 + cluster_rank() * 64;
        if (i / 4 != cluster_rank()) keys += C::kOther - C::kK;
      }
      ldmatrix<true>(x, keys + (column ^ swizzle) + i % 4 * (32 * C::kD));
      stmatrix(to + at * C::kKeys + (place ^ i % 4 * 2) * 16, __byte_perm(x[0], x[1], first),
               __byte_perm(x[0], x[1], second), __byte_perm(x[2], x[3], first),
               __byte_perm(x[2], x[3], second));
    }
    fence_async_proxy();
    named_sync(kTurnBarrier, kWarpgroup);
  }
};

}  // namespace sm90
}  // namespace torch_cubin
