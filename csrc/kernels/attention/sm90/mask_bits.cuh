// Converts boolean masks to bits, for both kernels that do so on Hopper (sm90/mask.cu,
// sm90/backward_mask.cu): a bit for each nonzero byte, 16 keys of a row at a time.
#pragma once

#include "common/ptx.cuh"
#include "forward_params.h"

namespace torch_cubin {
namespace sm90 {

// The bits of four bytes, in the result's four highest bits. Adding 0x7f to a byte's low 7 bits
// sets bit 7 if one of them is set; the product collects the four bits. Its other terms are single
// bits below, so nothing carries.
TC_DEVICE u32 high_bits_of(u32 bytes) {
  u32 any = (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) & 0x80808080u;
  return any * 0x00204081u;
}

TC_DEVICE u32 bits_of(u32 bytes) { return high_bits_of(bytes) >> 28; }

TC_DEVICE u32 bits_of(uint4 bytes) {
  u32 bits = bits_of(bytes.w);
  bits = __funnelshift_l(high_bits_of(bytes.z), bits, 4);
  bits = __funnelshift_l(high_bits_of(bytes.y), bits, 4);
  return __funnelshift_l(high_bits_of(bytes.x), bits, 4);
}

// For 16 keys of a row, of which the first `count` exist: one bit each.
TC_DEVICE u32 sixteen_bits(const unsigned char* from, tc_int64 step, int count) {
  u32 bits = 0;
  if (step == 1 && count >= 16 && reinterpret_cast<u64>(from) % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bits |= bits_of(__ldg(reinterpret_cast<const u32*>(from) + i)) << (4 * i);
    }
    return bits;
  }
#pragma unroll 1
  for (int i = 0; i < min(count, 16); ++i) {
    bits |= static_cast<u32>(__ldg(from + i * step) != 0) << i;
  }
  return bits;
}

// Converts `rows` rows to bits, in the kWarps warps of a block: each has a row at a time, and each
// lane 16 keys of it, of which the first `count` exist. `from`: the lane's keys in the first row. A
// thread requests its keys of kTogether rows at once; past the last row it reads that one again.
template <int kWarps, int kTogether, int kRowBits>
TC_DEVICE void read_rows(const unsigned char* from, tc_int64 row_stride, tc_int64 key_stride,
                         int rows, int count, u16 (*bits)[kRowBits]) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  bool vectors = key_stride == 1 && row_stride % 16 == 0 && reinterpret_cast<u64>(from) % 16 == 0 &&
                 count >= 16;
  if (vectors) {
#pragma unroll 1
    for (int first = warp; first < rows; first += kTogether * kWarps) {
      uint4 bytes[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        int row = min(first + j * kWarps, rows - 1);
        bytes[j] = __ldg(reinterpret_cast<const uint4*>(from + row * row_stride));
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        int row = min(first + j * kWarps, rows - 1);
        bits[row][lane] = static_cast<u16>(bits_of(bytes[j]));
      }
    }
    return;
  }
#pragma unroll 1
  for (int row = warp; row < rows; row += kWarps) {
    bits[row][lane] =
        static_cast<u16>(count > 0 ? sixteen_bits(from + row * row_stride, key_stride, count) : 0);
  }
}

}  // namespace sm90
}  // namespace torch_cubin
