// From mma accumulators to memory: bias, rounding, and stores that suit the output's layout.
//
// Lane 4g + t of a warp holds, of each m16n8 tile, columns 2t and 2t + 1 of rows g and g + 8.
#pragma once

#include "matmul_tile.cuh"

namespace torch_cubin {

// Transposes a 4x4 matrix of words spread over the 4 lanes of a quad, in two butterfly rounds.
TC_DEVICE void transpose_quad(u32 (&words)[4]) {
  int t = threadIdx.x % 4;
#pragma unroll
  for (int bit = 2; bit > 0; bit /= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      bool high = t & bit;
      u32 sent = high ? words[i] : words[i | bit];
      u32 got = __shfl_xor_sync(0xffffffffu, sent, bit);
      (high ? words[i] : words[i | bit]) = got;
    }
  }
}

template <DType kDType, class Accumulator>
TC_DEVICE void store_pair(typename DTypeTraits<kDType>::Storage* to, tc_int64 stride, bool vector,
                          int columns, const Accumulator (&pair)[2]) {
  using Traits = DTypeTraits<kDType>;
  if (vector) {  // both columns exist
    struct alignas(2 * sizeof(*to)) Pair {
      typename Traits::Storage values[2];
    };
    if (columns > 0) {
      *reinterpret_cast<Pair*>(to) = {Traits::round(pair[0]), Traits::round(pair[1])};
    }
    return;
  }
  if (columns > 0) to[0] = Traits::round(pair[0]);
  if (columns > 1) to[stride] = Traits::round(pair[1]);
}

// Rows of pairs to `to`, of type kDType: C, or the partial sums.
template <DType kDType, int kBlocksM, int kTilesN, class Accumulator>
TC_DEVICE void store_pairs(typename DTypeTraits<kDType>::Storage* to, tc_int64 stride_m,
                           tc_int64 stride_n, int rows, int columns,
                           const Accumulator (&sum)[kBlocksM][kTilesN][4]) {
  auto address = reinterpret_cast<u64>(to);
  constexpr int kPairBytes = 2 * sizeof(*to);
  bool vector = stride_n == 1 && stride_m * sizeof(*to) % kPairBytes == 0 &&
                address % kPairBytes == 0 && columns % 2 == 0;
#pragma unroll
  for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = 16 * i + 8 * half;
      if (row >= rows) continue;
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        const Accumulator pair[2] = {sum[i][j][2 * half], sum[i][j][2 * half + 1]};
        store_pair<kDType>(to + row * stride_m + 8 * j * stride_n, stride_n, vector,
                           columns - 8 * j, pair);
      }
    }
  }
}

// 16-bit C with rows of whole 16-byte vectors: after the transposition lane t of a quad holds the 8
// columns of the t-th of 4 neighbouring tiles, and a quad writes 64 contiguous bytes.
template <DType kDType, int kBlocksM, int kTilesN>
TC_DEVICE void store_vectors(u16* to, tc_int64 stride_m, int rows, int columns,
                             const float (&sum)[kBlocksM][kTilesN][4]) {
  static_assert(kTilesN % 4 == 0, "a quad takes 4 tiles at a time");
  struct alignas(16) Vector {
    u32 words[4];
  };
#pragma unroll
  for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kTilesN; j += 4) {
        Vector v;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const float(&s)[4] = sum[i][j + q];
          v.words[q] = DTypeTraits<kDType>::pack(s[2 * half], s[2 * half + 1]);
        }
        transpose_quad(v.words);
        int row = 16 * i + 8 * half;
        if (row < rows && 8 * j < columns) {
          *reinterpret_cast<Vector*>(to + row * stride_m + 8 * j) = v;
        }
      }
    }
  }
}

template <DType kDType, int kBlocksM, int kTilesN, class Accumulator>
TC_DEVICE void store_tile(const MatmulParams& p, const TileCoordinates& tile, int warp_m, int warp_n,
                          Accumulator (&sum)[kBlocksM][kTilesN][4]) {
  using Traits = DTypeTraits<kDType>;
  using Storage = typename Traits::Storage;
  int row = warp_m + threadIdx.x % 32 / 4;
  int column = warp_n + threadIdx.x % 4 * 2;
  // Clamped to int: a tile has fewer rows and columns than that.
  int rows = static_cast<int>(min(p.m - tile.m0, tc_int64(4096))) - row;
  int columns = static_cast<int>(min(p.n - tile.n0, tc_int64(4096))) - column;

  if (p.splits > 1) {
    constexpr DType kPartial = kDType == DType::float64 ? DType::float64 : DType::float32;
    auto to = static_cast<Accumulator*>(p.partial) + tile.partial + row * p.n + column;
    store_pairs<kPartial>(to, p.n, 1, rows, columns, sum);
    return;
  }
  if (p.bias != nullptr) {
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (8 * j + c >= columns) continue;
        Accumulator bias = load_bias<kDType>(p, tile.n0 + column + 8 * j + c);
#pragma unroll
        for (int i = 0; i < kBlocksM; ++i) {
          sum[i][j][c] += bias;
          sum[i][j][2 + c] += bias;
        }
      }
    }
  }
  auto c = static_cast<Storage*>(p.c) + tile.c + row * p.c_stride_m + column * p.c_stride_n;
  if constexpr (sizeof(Storage) == 2) {
    int t = threadIdx.x % 4;
    Storage* vectors = c + 6 * t;  // the lane's columns are 8t after the transposition, were 2t
    if (p.c_stride_n == 1 && p.n % 8 == 0 && p.c_stride_m % 8 == 0 &&
        reinterpret_cast<u64>(p.c) % 16 == 0) {
      store_vectors<kDType>(vectors, p.c_stride_m, rows, columns - 6 * t, sum);
      return;
    }
  }
  store_pairs<kDType>(c, p.c_stride_m, p.c_stride_n, rows, columns, sum);
}

}  // namespace torch_cubin
