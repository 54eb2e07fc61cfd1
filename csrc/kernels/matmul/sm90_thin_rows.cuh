// The thin last rows of a symmetric product, for sm90_symmetric.cu: up to kThinRows rows beyond
// whole tiles, where A and B are one matrix. They have no tiles of their own, which would take as
// long as others: a tile at the diagonal needs one operand, so that the thin rows of A take the
// place of the other one in its stages, and its upper right quarter is not multiplied.
//
// A tile at the diagonal of rows X_i and thin rows T gives X_i X_i^T and X_i T^T; the last one also
// the corner, T T^T. Each of these sums is stored twice, as itself and mirrored, so the result is
// symmetric bit by bit.
#pragma once

#include "sm90_squares.cuh"
#include "sm90_tiles.cuh"

namespace torch_cubin {
namespace sm90 {

constexpr int kThinRows = 16;  // most of them: wgmma reads A for as long as it multiplies 32

// Kernels that can take them.
template <class C>
constexpr bool kHasThinRows = Layout<C>::kPingPong && !C::kAMnMajor && !C::kBMnMajor;

template <class C>
TC_DEVICE bool has_thin_rows(const Sm90MatmulParams& p) {
  return kHasThinRows<C> && p.split_blocks == 2;
}

// Whether a tile's stages have thin rows in place of A's tile.
template <class C>
TC_DEVICE bool takes_thin_rows(const Sm90MatmulParams& p, const Work& w) {
  return has_thin_rows<C>(p) && w.m0 == w.n0;
}

// The first of the thin rows.
template <class C>
TC_DEVICE int thin_begin(const Sm90MatmulParams& p) {
  return p.n / C::kTileM * C::kTileM;
}

// Whether that tile gives the corner, too: the last one.
template <class C>
TC_DEVICE bool has_corner(const Sm90MatmulParams& p, const Work& w) {
  return w.n0 + C::kTileN == thin_begin<C>(p);
}

template <bool kValue>
struct Corner {
  static constexpr bool value = kValue;
};

// Sums of a warpgroup: of each 64 rows of the tile with the thin rows, and of those among
// themselves.
struct ThinSums {
  float of_tile[2][kThinRows / 2], corner[kThinRows / 2];
};

// multiply (sm90_tiles.cuh) of a tile at the diagonal. `rows` describes the stage's rows of the
// tile, which are both operands, and `thin` the thin rows.
template <class C, bool kCorner>
TC_DEVICE void multiply_with_thin_rows(float (&sum)[C::kBlocksM][C::kTileN / 2], ThinSums& sums,
                                       u64 rows, u64 thin, int add) {
  static_assert(C::kTileM == 128 && C::kTileN == 128 && C::kBlocksM == 2);
  auto& left = reinterpret_cast<float (&)[C::kTileN / 4]>(sum[0]);  // the upper half's
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int adds = k == 0 ? add : 1;
    const u64 upper = advance(rows, k * 32), lower = advance(upper, 8192);
    const u64 last = advance(thin, k * 32);
    Wgmma<C::kTileN / 2>::template run<kWgmmaType<C>, 0, 0>(left, upper, upper, adds);
    Wgmma<C::kTileN>::template run<kWgmmaType<C>, 0, 0>(sum[1], lower, upper, adds);
    Wgmma<kThinRows>::template run<kWgmmaType<C>, 0, 0>(sums.of_tile[0], upper, last, adds);
    Wgmma<kThinRows>::template run<kWgmmaType<C>, 0, 0>(sums.of_tile[1], lower, last, adds);
    if constexpr (kCorner) {
      Wgmma<kThinRows>::template run<kWgmmaType<C>, 0, 0>(sums.corner, last, last, adds);
    }
  }
  wgmma_commit();
}

// Stores a 64 x kThinRows block of sums, whose first element is of row m and column n, and its
// mirror image. m is the thin rows' first, too, if the block is the corner: of it the lower
// triangle is taken.
template <class C>
TC_DEVICE void store_thin_block(const Sm90MatmulParams& p, const Work& w, int m, int n,
                                const float (&sum)[kThinRows / 2]) {
  using Traits = DTypeTraits<C::kType>;
  using Storage = typename Traits::Storage;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const tc_int64 size = p.n;
  const tc_int64 matrix = (static_cast<tc_int64>(w.b2) * p.batch[1] + w.b1) * p.batch[0] + w.b0;
  const auto out = static_cast<Storage*>(p.out) + matrix * size * size;
  const auto addend = static_cast<const Storage*>(p.addend) + w.b0 * p.addend_batch_stride[0] +
                      w.b1 * p.addend_batch_stride[1] + w.b2 * p.addend_batch_stride[2];
#pragma unroll
  for (int i = 0; i < kThinRows / 2; ++i) {
    const int row = m + warp * 16 + lane / 4 + i / 2 % 2 * 8;
    const int column = n + i / 4 * 8 + lane % 4 * 2 + i % 2;
    // A column of the thin rows is a row of the lower triangle.
    if (column >= p.n || row > column) continue;
    float x = __fmul_rn(p.alpha, sum[i]);
    if (p.addend != nullptr) {
      const auto from = addend + column * p.addend_stride_m + row * p.addend_stride_n;
      x = __fmaf_rn(p.beta, Traits::load(*from), x);
    }
    const Storage rounded = Traits::round(x);
    out[row * size + column] = rounded;
    out[column * size + row] = rounded;
  }
}

template <class C, bool kCorner>
TC_DEVICE void store_thin_rows(const Sm90MatmulParams& p, const Work& w, ThinSums& sums) {
  const int thin = thin_begin<C>(p);
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) {
    keep_in_place(sums.of_tile[i]);
    store_thin_block<C>(p, w, w.m0 + i * Layout<C>::kRows, thin, sums.of_tile[i]);
  }
  if constexpr (kCorner) {
    keep_in_place(sums.corner);
    store_thin_block<C>(p, w, thin, thin, sums.corner);
  }
}

}  // namespace sm90
}  // namespace torch_cubin
