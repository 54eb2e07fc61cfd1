// Stores mma accumulators: bias, rounding, and stores of whole vectors. A warp writes its results
// to its part of shared memory and copies them from there in one short loop. (Stores directly from
// registers took 2000 instructions, each executed once and mostly stalled on instruction fetch.)
#pragma once

#include "tile.cuh"

namespace torch_cubin {

// Copies kRows x kColumns elements from `from`, with a row pitch of kPitch bytes. Only the first
// `rows` rows and `columns` columns exist in the output.
template <int kRows, int kColumns, int kPitch, class Element>
TC_DEVICE void copy_out(const unsigned char* from, Element* to, tc_int64 stride_m,
                        tc_int64 stride_n, int rows, int columns) {
  constexpr int kSize = 16 / sizeof(Element);
  struct alignas(16) Vector {
    Element values[kSize];
  };
  int lane = threadIdx.x % 32;
  if (stride_n == 1 && stride_m % kSize == 0 && columns % kSize == 0 &&
      reinterpret_cast<u64>(to) % 16 == 0) {
    constexpr int kLanes = kColumns / kSize;  // per row
    int column = lane % kLanes * kSize;
    if (column >= columns) return;
    from += column * sizeof(Element);
    to += column;
#pragma unroll 4
    for (int row = lane / kLanes; row < kRows; row += 32 / kLanes) {
      if (row < rows) {
        *reinterpret_cast<Vector*>(to + row * stride_m) =
            *reinterpret_cast<const Vector*>(from + row * kPitch);
      }
    }
    return;
  }
  bool along_n = stride_n <= stride_m;
#pragma unroll 1
  for (int i = lane; i < kRows * kColumns; i += 32) {
    int row = along_n ? i / kColumns : i % kRows;
    int column = along_n ? i % kColumns : i / kRows;
    if (row >= rows || column >= columns) continue;
    to[row * stride_m + column * stride_n] =
        *reinterpret_cast<const Element*>(from + row * kPitch + column * sizeof(Element));
  }
}

// Rounds one warp's accumulators to kDType and writes them to `to`. The warp has kBlocksM x kTilesN
// m16n8 tiles, of which lane 4g + t holds columns 2t and 2t + 1 of rows g and g + 8. `mine` is the
// warp's shared memory, of kSharedBytes.
template <DType kDType, int kSharedBytes, int kBlocksM, int kTilesN, class Accumulator>
TC_DEVICE void write_warp(unsigned char* mine, typename DTypeTraits<kDType>::Storage* to,
                          tc_int64 stride_m, tc_int64 stride_n, int rows, int columns,
                          const Accumulator (&sum)[kBlocksM][kTilesN][4]) {
  using Traits = DTypeTraits<kDType>;
  using Storage = typename Traits::Storage;
  struct alignas(2 * sizeof(Storage)) Pair {
    Storage values[2];
  };
  // Padding of 4 pairs puts the rows that a warp writes at once into different banks.
  constexpr int kPitch = (kTilesN * 4 + 4) * sizeof(Pair);
  constexpr int kFitting = kSharedBytes / (16 * kPitch);
  constexpr int kAtOnce = kFitting >= kBlocksM ? kBlocksM : kFitting >= 2 ? 2 : 1;
  static_assert(kFitting >= 1 && kBlocksM % kAtOnce == 0 && kPitch % 16 == 0, "16 rows must fit");

  int lane = threadIdx.x % 32;
  auto pairs = mine + lane / 4 * kPitch + lane % 4 * sizeof(Pair);
#pragma unroll
  for (int first = 0; first < kBlocksM; first += kAtOnce) {
    if (first > 0) __syncwarp();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < kTilesN; ++j) {
          const auto& s = sum[first + i][j];
          auto at = pairs + (16 * i + 8 * half) * kPitch + j * 4 * sizeof(Pair);
          if constexpr (sizeof(Storage) == 2) {
            *reinterpret_cast<u32*>(at) = Traits::pack(s[2 * half], s[2 * half + 1]);
          } else {
            *reinterpret_cast<Pair*>(at) = {s[2 * half], s[2 * half + 1]};
          }
        }
      }
    }
    __syncwarp();
    copy_out<16 * kAtOnce, 8 * kTilesN, kPitch>(mine, to + 16 * first * stride_m, stride_m,
                                                stride_n, rows - 16 * first, columns);
  }
}

template <DType kDType, int kBlocksM, int kTilesN, class Accumulator>
TC_DEVICE void add_bias(const MatmulParams& p, tc_int64 first_column, int columns,
                        Accumulator (&sum)[kBlocksM][kTilesN][4]) {
#pragma unroll
  for (int j = 0; j < kTilesN; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      int column = threadIdx.x % 4 * 2 + 8 * j + c;
      if (column >= columns) continue;
      Accumulator bias = load_bias<kDType>(p, first_column + column);
#pragma unroll
      for (int i = 0; i < kBlocksM; ++i) {
        sum[i][j][c] += bias;
        sum[i][j][2 + c] += bias;
      }
    }
  }
}

// The end of a kernel: stores `sum` to C, or to the partial sums of this split. Each warp has
// kSharedBytes, a multiple of 16, at `shared`.
template <DType kDType, int kSharedBytes, int kBlocksM, int kTilesN, class Accumulator>
TC_DEVICE void store_tile(const MatmulParams& p, const TileCoordinates& tile, int warp_m,
                          int warp_n, unsigned char* shared,
                          Accumulator (&sum)[kBlocksM][kTilesN][4]) {
  using Storage = typename DTypeTraits<kDType>::Storage;
  auto mine = shared + threadIdx.x / 32 * kSharedBytes;
  // 2^16 exceeds the rows and columns of any tile.
  int rows = static_cast<int>(min(p.m - tile.m0, tc_int64(1 << 16))) - warp_m;
  int columns = static_cast<int>(min(p.n - tile.n0, tc_int64(1 << 16))) - warp_n;
  if (p.partial != nullptr) {
    constexpr DType kPartial = kDType == DType::float64 ? DType::float64 : DType::float32;
    auto partial = static_cast<Accumulator*>(p.partial) + tile.partial + warp_m * p.n + warp_n;
    write_warp<kPartial, kSharedBytes>(mine, partial, p.n, 1, rows, columns, sum);
    return;
  }
  if (p.bias != nullptr) add_bias<kDType>(p, tile.n0 + warp_n, columns, sum);
  auto c = static_cast<Storage*>(p.c) + tile.c + warp_m * p.c_stride_m + warp_n * p.c_stride_n;
  write_warp<kDType, kSharedBytes>(mine, c, p.c_stride_m, p.c_stride_n, rows, columns, sum);
}

// store_tile for a full tile of a product that is not split.
template <DType kDType, int kSharedBytes, int kBlocksM, int kTilesN, class Accumulator>
TC_DEVICE void store_whole_tile(const MatmulParams& p, const TileCoordinates& tile, int warp_m,
                                int warp_n, unsigned char* shared,
                                Accumulator (&sum)[kBlocksM][kTilesN][4]) {
  using Storage = typename DTypeTraits<kDType>::Storage;
  constexpr int kRows = 16 * kBlocksM, kColumns = 8 * kTilesN;
  auto mine = shared + threadIdx.x / 32 * kSharedBytes;
  if (p.bias != nullptr) add_bias<kDType>(p, tile.n0 + warp_n, kColumns, sum);
  auto c = static_cast<Storage*>(p.c) + tile.c + warp_m * p.c_stride_m + warp_n * p.c_stride_n;
  write_warp<kDType, kSharedBytes>(mine, c, p.c_stride_m, p.c_stride_n, kRows, kColumns, sum);
}

}  // namespace torch_cubin
