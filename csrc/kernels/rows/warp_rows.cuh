// Rows by vectors of 16 bits of which each belongs to 8, 16 or 32 lanes of a warp, which hold it in
// registers: warps read and write whole lines, and no warp waits for another one.
//
// A block has kRows rows for each of its groups of lanes. The table of a kernel gives both: `tile`
// is [rows of a group, columns at most, 1].
#pragma once

#include "rows.cuh"

namespace torch_cubin {

// The rows of a thread of kBlock, and its vectors of each: at columns (lane + i * kLanes) * 8. Rows
// have all vectors of a thread but the last kUnsure.
template <int kDtype, int kBlock, int kLanes, int kRows, int kVectors, int kUnsure>
struct WarpRows {
  using Access = Vectors<kDtype>;
  using Raw = typename Access::Raw;
  static constexpr int kElements = Access::kElements;
  static constexpr int kApart = kBlock / kLanes;  // rows
  static_assert(Access::kParts == 1);
  const tc_int64 rows;
  const int columns;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const tc_int64 first =
      static_cast<tc_int64>(blockIdx.x) * (kApart * kRows) + threadIdx.x / kLanes;

  TC_DEVICE WarpRows(tc_int64 rows, int columns) : rows(rows), columns(columns) {}

  TC_DEVICE tc_int64 row(int r) const { return first + r * kApart; }
  TC_DEVICE bool has_row(int r) const { return row(r) < rows; }
  TC_DEVICE int column(int i) const { return (lane + i * kLanes) * kElements; }
  TC_DEVICE bool has(int i) const { return i < kVectors - kUnsure || column(i) < columns; }

  // Calls body(r, i) for all vectors.
  template <class Body>
  TC_DEVICE void for_each(Body&& body) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) body(r, i);
    }
  }

  // Where the thread's first vectors are in a tensor's rows. A kernel computes it before the
  // previous one has ended (H200, layer norm of 256 x 1024 1.96 -> 1.85 us).
  struct Places {
    const char* of[kRows];
  };
  TC_DEVICE Places places(const void* tensor, tc_int64 stride) const {
    Places places;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      places.of[r] = RowOf(tensor, row(r) * stride + column(0), kDtype).data;
      asm volatile("" : "+l"(places.of[r]));  // here, not where it is used
    }
    return places;
  }

  // Vectors that are not there remain as they are. kOnce: past the L1 cache.
  template <bool kOnce = false>
  TC_DEVICE void load(Raw (&raw)[kRows][kVectors], const Places& from) const {
    for_each([&](int r, int i) {
      if (!has_row(r) || !has(i)) return;
      const RowOf own(from.of[r], 0, kDtype);
      kOnce ? Access::load_raw_once(raw[r][i], own, i * kLanes * kElements)
            : Access::load_raw(raw[r][i], own, i * kLanes * kElements);
    });
  }

  // The same value for all lanes of a row: join(a, b) commutes.
  template <class Join>
  TC_DEVICE void join(float (&values)[kRows], Join&& join) const {
#pragma unroll
    for (int other = kLanes / 2; other > 0; other /= 2) {
#pragma unroll
      for (float& value : values) value = join(value, __shfl_xor_sync(~0u, value, other));
    }
  }
  TC_DEVICE void sum(float (&values)[kRows]) const {
    join(values, [](float a, float b) { return a + b; });
  }
};

// Calls run(Constant<kLanes>{}) with the lanes of a row. Those of one vector a thread may have
// fewer than a warp.
template <int kVectors, class Run>
TC_DEVICE void with_lanes(int threads, Run&& run) {
  if constexpr (kVectors == 1) {
    if (threads == 8) return run(Constant<8>{});
    if (threads == 16) return run(Constant<16>{});
  }
  run(Constant<32>{});
}

}  // namespace torch_cubin
