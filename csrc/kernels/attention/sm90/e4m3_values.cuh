// Transposes a block of e4m3 values in shared memory for sm90/e4m3.cu, since wgmma transposes
// 16-bit types only: from rows of keys, as the TMA loads them, to columns of keys, in the order in
// which weights lie in registers.
#pragma once

#include "common/hopper.cuh"

namespace torch_cubin {
namespace sm90 {

// By two warps: `half` is 0 or 1. `from`: a panel, of kKeys rows of kColumns bytes under the
// swizzle of as many. `to`: kColumns rows of 128 keys under the 128-byte swizzle. Within each 16
// keys, index 4 * t + i gets key 2 * t + i % 2 + i / 2 * 8: thread t of a quad has the weights of
// these four after the scores' product, and provides those indices to the next product.
//
// ldmatrix transposes pairs of columns: a thread gets two of 2 keys from each 8 keys, and divides
// those of 16 keys into a word of either column. Of a matrix that is stored, the upper four rows
// are even columns and the lower four odd ones, or the reverse: eight different groups of banks.
// kAhead loads are in flight, each of 32 keys by 16 columns: with one warp, which waited for each
// two, a block of 128 columns took 2,800 cycles, longer than its products.
template <int kColumns, int kKeys, int kAhead>
TC_DEVICE void transpose_values(u32 from, u32 to, int half) {
  static_assert(kKeys == 128 || kKeys == 64);
  constexpr int kDown = kKeys / 32, kSteps = kColumns / 32 * kDown;
  int lane = threadIdx.x % 32;
  u32 swizzle = lane % 8 * kColumns / 128 * 16;
  int column = lane % 8 * 2 + (lane / 8 + lane % 8 / 4) % 2;
  u32 place = column / (128 / kKeys) % (kKeys / 16) ^ (lane / 16);
  u32 first = lane < 16 ? 0x6420 : 0x7531, second = first ^ 0x1111;
  u32 at = half * (kColumns / 2);  // of the 16 columns
  from += lane * kColumns;
  to += (at + column) * kKeys;
  u32 x[kAhead + 1][4];
  auto load = [&](int step) {
    u32 part = (at + step / kDown * 16) ^ swizzle;
    ldmatrix<true>(x[step % (kAhead + 1)], from + part + step % kDown * (32 * kColumns));
  };
#pragma unroll
  for (int step = 0; step < kAhead; ++step) load(step);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step + kAhead < kSteps) load(step + kAhead);
    const u32(&y)[4] = x[step % (kAhead + 1)];
    stmatrix(to + step / kDown * (16 * kKeys) + (place ^ step % kDown * 2) * 16,
             __byte_perm(y[0], y[1], first), __byte_perm(y[0], y[1], second),
             __byte_perm(y[2], y[3], first), __byte_perm(y[2], y[3], second));
  }
}

}  // namespace sm90
}  // namespace torch_cubin
