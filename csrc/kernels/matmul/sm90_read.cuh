// A producer for 16-bit operands with unaligned rows, which no tensor map can describe: the
// producer's whole warpgroup reads them, 16 aligned bytes at a time, shifts them, and stores them
// in the TMA's layout. Slower than the TMA, and with a long K slower than a copy, but short
// products save the launch of a copy.
//
// An aligned operand is still loaded by the TMA. Clusters do not share operands that are read.
#pragma once

#include "sm90_schedule.cuh"

namespace torch_cubin {
namespace sm90 {

constexpr int kReaders = kWarpgroup;
// Arrivals at a full barrier: the thread that issues the TMA loads, and each warp.
constexpr int kReadArrivals = 1 + kReaders / 32;

// One thread's part of an operand's tile for one k block: a vector of 8 elements in each of kPasses
// lines, kStep lines apart, in the layout of load_operand. A line is 128 bytes in shared memory: a
// row of the tile, or 64 of its columns at one k.
template <bool kMnMajor, int kRows, int kTileK>
struct Reader {
  static constexpr int kLines = kMnMajor ? kRows / 64 * kTileK : kRows;
  static constexpr int kStep = kReaders / 8, kPasses = kLines / kStep;
  static constexpr int kSpan = kMnMajor ? kTileK / kStep : kPasses;  // passes of the same columns
  static_assert(kTileK == 64 && kLines % kStep == 0 && kPasses <= 8);

  uint4 low[kPasses], high[kPasses];
  u32 shifts;     // 4 bits per pass: bytes of `low` before the first element
  u32 elsewhere;  // 1 bit per pass: its vectors are partly outside the operand

  static TC_DEVICE int vector() { return threadIdx.x % 8; }
  static TC_DEVICE int line() { return threadIdx.x / 8; }
  // The vector's index in the operand's contiguous dim. count(): how many of its elements exist.
  static TC_DEVICE int column(int pass, int mn, int k) {
    return (kMnMajor ? mn + pass / kSpan * 64 : k) + vector() * 8;
  }
  static TC_DEVICE int count(int pass, int mn, int mn_size, int k, int k_size) {
    int left = (kMnMajor ? mn_size : k_size) - column(pass, mn, k);
    return in_row(pass, mn, k) < (kMnMajor ? k_size : mn_size) ? min(left, 8) : 0;
  }
  static TC_DEVICE int in_row(int pass, int mn, int k) {
    return (kMnMajor ? k : mn) + pass % kSpan * kStep + line();
  }
  static TC_DEVICE tc_int64 address(const Sm90Rows& rows, int pass, int mn, int k) {
    auto from = static_cast<const u16*>(rows.from) + in_row(pass, mn, k) * rows.stride;
    return reinterpret_cast<tc_int64>(from + column(pass, mn, k));
  }

  // Issues the loads. `mn` and `k`: the tile's first row (column) and element of K; the sizes are
  // the operand's.
  TC_DEVICE void request(const Sm90Rows& rows, int mn, int mn_size, int k, int k_size) {
    shifts = elsewhere = 0;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      low[i] = high[i] = make_uint4(0, 0, 0, 0);
      tc_int64 at = address(rows, i, mn, k), aligned = at & ~tc_int64(15);
      bool exists = count(i, mn, mn_size, k, k_size) > 0;
      bool inside = aligned >= rows.low && aligned + 32 <= rows.high;
      shifts |= static_cast<u32>(at & 15) << (4 * i);
      if (exists && !inside) elsewhere |= 1u << i;
      if (exists && inside) {
        low[i] = __ldg(reinterpret_cast<const uint4*>(aligned));
        high[i] = __ldg(reinterpret_cast<const uint4*>(aligned) + 1);
      }
    }
  }

  // Stores the vectors to shared memory, with zeros for elements that do not exist.
  TC_DEVICE void store(const Sm90Rows& rows, u32 to, int mn, int mn_size, int k, int k_size) const {
    to += line() * 128 + ((vector() ^ (line() & 7)) * 16);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      u32 w[8] = {low[i].x,  low[i].y,  low[i].z,  low[i].w,
                  high[i].x, high[i].y, high[i].z, high[i].w};
      if (shifts >> (4 * i) & 8) {
#pragma unroll
        for (int j = 0; j < 6; ++j) w[j] = w[j + 2];
      }
      if (shifts >> (4 * i) & 4) {
#pragma unroll
        for (int j = 0; j < 5; ++j) w[j] = w[j + 1];
      }
      u32 bits = (shifts >> (4 * i) & 2) * 8;
      int exist = count(i, mn, mn_size, k, k_size);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        w[j] = __funnelshift_r(w[j], w[j + 1], bits);
        if (2 * j + 1 >= exist) w[j] = 2 * j < exist ? w[j] & 0xffff : 0;
      }
      store_vector(to + i * kStep * 128, w);
    }
    // The operand's first and last vectors are read by element, and nothing outside the operand.
    if (elsewhere == 0) return;
#pragma unroll 1
    for (int i = 0; i < kPasses; ++i) {
      if ((elsewhere >> i & 1) == 0) continue;
      auto from = reinterpret_cast<const u16*>(address(rows, i, mn, k));
      int exist = count(i, mn, mn_size, k, k_size);
      u32 w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u32 first = 2 * j < exist ? __ldg(from + 2 * j) : u16(0);
        u32 second = 2 * j + 1 < exist ? __ldg(from + 2 * j + 1) : u16(0);
        w[j] = first | second << 16;
      }
      store_vector(to + i * kStep * 128, w);
    }
  }

  static TC_DEVICE void store_vector(u32 to, const u32* w) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(w[0]), "r"(w[1]),
                 "r"(w[2]), "r"(w[3])
                 : "memory");
  }
};

}  // namespace sm90
}  // namespace torch_cubin
