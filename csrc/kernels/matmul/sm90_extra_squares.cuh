// The tiles at the diagonal of a symmetric product four by three, for sm90_symmetric.cu, where A
// and B are one matrix. A tile of 128 x 128 has four squares of 64 x 64. One at the diagonal needs
// three of them, and one operand: so every fourth such tile is not computed by itself. Its three
// squares are extra squares of the three tiles before it, each in place of the one above the
// diagonal, and their rows take the place of the other operand in the stages.
//
// 2048 x 2048 has 132 tiles so, in place of 136: one for each multiprocessor of an H200.
#pragma once

#include "sm90_squares.cuh"
#include "sm90_tiles.cuh"

namespace torch_cubin {
namespace sm90 {

// A config whose tile has an extra square.
template <class C>
struct WithExtra : C {};
template <class C>
constexpr bool kIsWithExtra = false;
template <class C>
constexpr bool kIsWithExtra<WithExtra<C>> = true;

// Whether the product's tiles at the diagonal are four by three.
template <class C>
TC_DEVICE bool has_extra_squares(const Sm90MatmulParams& p) {
  return kTakesExtraSquares<C> && p.split_blocks == 3;
}

// Whether an extra square's columns are not its rows, so that both are loaded.
TC_DEVICE bool has_two_operands(const Work& w) { return extra_m0(w) != extra_n0(w); }

// The number of a matrix's tiles at the diagonal.
template <class C>
TC_DEVICE int count_diagonal(int rows) {
  return rows - rows / 4;
}

// Places the tile at the diagonal of that number.
template <class C>
TC_DEVICE void place_diagonal(int number, int rows, Work& w) {
  const int four = number / 3, of_four = number - 3 * four;
  if (four < rows / 4) {
    const int first = (4 * four + 3) * C::kTileM;  // of the tile that is not computed by itself
    const int second = first + Layout<C>::kRows;
    extra_m0(w) = of_four == 0 ? first : second;
    extra_n0(w) = of_four == 1 ? second : first;
    number += four;
  } else {
    number += rows / 4;
  }
  w.m0 = w.n0 = number * C::kTileM;
}

// Loads the rows of an extra square's operands to A's place in a stage; `a` has boxes of as many.
template <class C>
TC_DEVICE void load_extra_square(const Sm90TensorMap& a, u32 to, u32 full, bool batched, int k,
                                 const Work& w) {
  const Share alone = {0, 0, 1};
  load_operand<false, Layout<C>::kRows, C::kTileK>(a, to, full, alone, batched, extra_m0(w), k, w);
  if (has_two_operands(w)) {
    load_operand<false, Layout<C>::kRows, C::kTileK>(a, to + Layout<C>::kHalfBytes, full, alone,
                                                     batched, extra_n0(w), k, w);
  }
}

// Sums of the upper 64 rows of such a tile.
template <class C>
struct SquareSums {
  float own[C::kTileN / 4], extra[C::kTileN / 4];
};

// multiply (sm90_tiles.cuh) of the upper 64 rows of a tile with an extra square: `rows` describes
// them, which are both operands, and the others are those of the extra square.
template <class C>
TC_DEVICE void multiply_with_extra_square(SquareSums<C>& sums, u64 rows, u64 extra_rows,
                                          u64 extra_columns, int add) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int adds = k == 0 ? add : 1;
    const u64 upper = advance(rows, k * 32);
    Wgmma<C::kTileN / 2>::template run<kWgmmaType<C>, 0, 0>(sums.own, upper, upper, adds);
    Wgmma<C::kTileN / 2>::template run<kWgmmaType<C>, 0, 0>(sums.extra, advance(extra_rows, k * 32),
                                                            advance(extra_columns, k * 32), adds);
  }
  wgmma_commit();
}

}  // namespace sm90
}  // namespace torch_cubin
