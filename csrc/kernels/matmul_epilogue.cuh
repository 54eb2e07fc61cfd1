// From mma accumulators to memory: a warp lays its accumulators into its part of shared memory and
// writes them from there, so that stores are whole vectors, and the code is one short loop. (Stores
// straight from the registers made 2000 instructions, each run once, mostly waiting for their fetch.)
#pragma once

#include "matmul_tile.cuh"

namespace torch_cubin {

// Where a warp's block of accumulators goes: C, or the partial sums of a split.
template <DType kDType>
struct Output {
  using Storage = typename DTypeTraits<kDType>::Storage;
  Storage* to;  // the block's first element
  tc_int64 stride_m, stride_n;
  int rows, columns;     // that exist, from the block's first on
  const Storage* bias;  // of the block's first column, or null
  tc_int64 bias_stride;
};

template <class Element>
struct alignas(16) Vector16 {
  static constexpr int kSize = 16 / sizeof(Element);
  Element values[kSize];
};

// Copies kRows x kColumns accumulators that lie kPitch bytes a row at `from`.
template <DType kDType, int kRows, int kColumns, int kPitch, class Accumulator>
TC_DEVICE void write_rows(const Output<kDType>& out, const unsigned char* from, int first_row) {
  using Traits = DTypeTraits<kDType>;
  using Storage = typename Traits::Storage;
  using Vector = Vector16<Storage>;
  constexpr int kSize = Vector::kSize;
  int lane = threadIdx.x % 32;
  bool vectors = out.stride_n == 1 && out.stride_m % kSize == 0 && out.columns % kSize == 0 &&
                 reinterpret_cast<u64>(out.to) % 16 == 0;
  if (vectors) {
    constexpr int kLanes = kColumns / kSize;  // for a row
    int column = lane % kLanes * kSize;
    if (column >= out.columns) return;
    Accumulator bias[kSize];
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      bias[e] = out.bias ? Traits::load(out.bias[(column + e) * out.bias_stride]) : Accumulator(0);
    }
#pragma unroll 2
    for (int row = lane / kLanes; row < kRows; row += 32 / kLanes) {
      if (first_row + row >= out.rows) return;
      Vector16<Accumulator> sums[sizeof(Accumulator) / sizeof(Storage)];
      auto source = reinterpret_cast<const Vector16<Accumulator>*>(from + row * kPitch +
                                                                   column * sizeof(Accumulator));
      Vector v;
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        constexpr int kPer = Vector16<Accumulator>::kSize;
        if (e % kPer == 0) sums[e / kPer] = source[e / kPer];
        v.values[e] = Traits::round(sums[e / kPer].values[e % kPer] + bias[e]);
      }
      *reinterpret_cast<Vector*>(out.to + (first_row + row) * out.stride_m + column) = v;
    }
    return;
  }
  bool along_n = out.stride_n <= out.stride_m;
#pragma unroll 1
  for (int i = lane; i < kRows * kColumns; i += 32) {
    int row = along_n ? i / kColumns : i % kRows;
    int column = along_n ? i % kColumns : i / kRows;
    if (first_row + row >= out.rows || column >= out.columns) continue;
    auto value = *reinterpret_cast<const Accumulator*>(from + row * kPitch +
                                                       column * sizeof(Accumulator));
    if (out.bias) value += Traits::load(out.bias[column * out.bias_stride]);
    out.to[(first_row + row) * out.stride_m + column * out.stride_n] = Traits::round(value);
  }
}

// The accumulators of kBlocksM x kTilesN m16n8 tiles of one warp, of which lane 4g + t holds columns
// 2t and 2t + 1 of rows g and g + 8. Each warp has kSharedBytes, a multiple of 16, of shared memory.
template <DType kDType, int kSharedBytes, int kBlocksM, int kTilesN, class Accumulator>
TC_DEVICE void store_tile(const MatmulParams& p, const TileCoordinates& tile, int warp_m, int warp_n,
                          unsigned char* shared, const Accumulator (&sum)[kBlocksM][kTilesN][4]) {
  constexpr DType kPartial = kDType == DType::float64 ? DType::float64 : DType::float32;
  // A quarter of a warp's banks of padding keeps the pairs of 4 rows, or of 2, apart.
  constexpr int kPitch = kTilesN * 8 * sizeof(Accumulator) + 8 * sizeof(Accumulator);
  constexpr int kFitting = kSharedBytes / (16 * kPitch);
  constexpr int kAtOnce = kFitting >= kBlocksM ? kBlocksM : kFitting >= 2 ? 2 : 1;
  static_assert(kFitting >= 1 && kBlocksM % kAtOnce == 0, "one block of 16 rows must fit");
  struct alignas(2 * sizeof(Accumulator)) Pair {
    Accumulator values[2];
  };

  int lane = threadIdx.x % 32;
  auto mine = shared + threadIdx.x / 32 * kSharedBytes;
  auto to = mine + lane / 4 * kPitch + lane % 4 * sizeof(Pair);
  // A tile has far fewer rows and columns than 2^16.
  int rows = static_cast<int>(min(p.m - tile.m0, tc_int64(1 << 16))) - warp_m;
  int columns = static_cast<int>(min(p.n - tile.n0, tc_int64(1 << 16))) - warp_n;
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
          *reinterpret_cast<Pair*>(to + (16 * i + 8 * half) * kPitch + j * 4 * sizeof(Pair)) = {
              s[2 * half], s[2 * half + 1]};
        }
      }
    }
    __syncwarp();
    if (p.splits > 1) {
      auto partial = static_cast<Accumulator*>(p.partial) + tile.partial + warp_m * p.n + warp_n;
      Output<kPartial> out{partial, p.n, 1, rows, columns, nullptr, 0};
      write_rows<kPartial, 16 * kAtOnce, 8 * kTilesN, kPitch, Accumulator>(out, mine, 16 * first);
    } else {
      using Storage = typename DTypeTraits<kDType>::Storage;
      auto c = static_cast<Storage*>(p.c) + tile.c + warp_m * p.c_stride_m + warp_n * p.c_stride_n;
      auto bias = static_cast<const Storage*>(p.bias);
      if (bias) bias += (tile.n0 + warp_n) * p.bias_stride;
      Output<kDType> out{c, p.c_stride_m, p.c_stride_n, rows, columns, bias, p.bias_stride};
      write_rows<kDType, 16 * kAtOnce, 8 * kTilesN, kPitch, Accumulator>(out, mine, 16 * first);
    }
  }
}

}  // namespace torch_cubin
