// The parameter of the kernels of sm90_symmetric.cu, shared by host and device code.
//
// For n <= m:
//   out[b, m, n] = out[b, n, m] = round(alpha * sum_k A[b, m, k] * B[b, k, n] + beta * addend[b, m, n])
//
// A, B and out are described by tensor maps of 2 dims, or with kSymmetricBatched of 5, as those of
// sm90_params.h; out's boxes have 128 bytes of columns and 16 rows. Rows of out are multiples of 16
// bytes. Of the addend, too, only the lower triangle is used.
#pragma once

#include "sm90_params.h"

namespace torch_cubin {

enum Sm90SymmetricFlags {
  kSymmetricBatched = 1,     // tensor maps have 5 dims
  kSymmetricSerpentine = 2,  // K backwards in every other tile, to reuse the L2 cache
  kSymmetricAddVectors = 4,  // the addend has aligned rows of whole 16-byte vectors
};

struct Sm90SymmetricParams {
  Sm90TensorMap a, b, out;
  const void* addend;  // null: none
  tc_int64 addend_stride_m, addend_stride_n, addend_batch_stride[3];
  float alpha, beta;
  int n;          // rows and columns of out
  int k_blocks;   // 128-byte blocks of K, at least 1
  int batch[3];   // innermost first, 1 where unused
  int group;      // rows of tiles per group of the tile order
  int tiles;      // of one matrix: those of the lower triangle, whole or in part
  int all_tiles;  // of all batches
  int flags;
};

}  // namespace torch_cubin
