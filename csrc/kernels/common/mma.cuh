// Tensor-core products (mma.sync) of every element type: the instruction, and a shared memory
// layout whose fragment loads have no bank conflicts.
//
// In words (4 bytes: two 16-bit elements or one tf32; 8 bytes: one double) all mma shapes used have
// the same fragments. Lane 4g + t holds words j = 0..3 of a 16 x 8-word block:
//
//   A: row g + 8 (j & 1), word t + 4 (j >> 1)
//   B (two n8 tiles): row g + 8 (j >> 1), word t + 4 (j & 1)
#pragma once

#include "dtype.cuh"

namespace torch_cubin {

// The tile's layout in shared memory: rows of kRowBytes, in chunks of 16 bytes. The chunk index is
// XORed with a function of the row, so that a warp's reads have no bank conflicts:
//   ldmatrix reads one chunk of 8 consecutive rows; word loads read 2 chunks of 4 consecutive rows.
template <int kRowBytes, bool kLdmatrix>
struct Swizzle {
  static constexpr int kChunks = kRowBytes / 16;
  static_assert(kLdmatrix || kChunks >= 8, "word loads need rows of 128 bytes");

  static TC_DEVICE int row_term(int row) {
    if constexpr (!kLdmatrix) return (row & 3) << 1;
    constexpr int kRowsPerLine = kRowBytes < 128 ? 128 / kRowBytes : 1;
    return (row / kRowsPerLine) & ((kChunks < 8 ? kChunks : 8) - 1);
  }
  static TC_DEVICE int offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ row_term(row)) << 4);
  }
};

// pointer + step. The asm keeps the compiler from recomputing the sum by a multiplication at each
// use, which takes registers that the fragments need.
TC_DEVICE const char* advance(const char* pointer, tc_int64 step) {
  asm volatile("add.s64 %0, %0, %1;" : "+l"(pointer) : "l"(step));
  return pointer;
}

// Rounds float32 to tf32; the mma would truncate, with 2.6 times the error.
template <DType kDType, class Word, int kBlocks>
TC_DEVICE void round_fragments(Word (&fragments)[kBlocks][4]) {
  if constexpr (kDType == DType::float32) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) fragments[i][j] = round_to_tf32(fragments[i][j]);
  }
}

template <DType kDType, class Accumulator, class Word>
TC_DEVICE void mma(Accumulator (&sum)[4], const Word (&a)[4], Word b0, Word b1) {
  if constexpr (kDType == DType::float16) mma_f16(sum, a, b0, b1);
  if constexpr (kDType == DType::bfloat16) mma_bf16(sum, a, b0, b1);
  if constexpr (kDType == DType::float32) mma_tf32(sum, a, b0, b1);
  if constexpr (kDType == DType::float64) mma_f64(sum, a, b0, b1);
}

}  // namespace torch_cubin
