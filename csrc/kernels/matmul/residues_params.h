// The parameter of the kernels of residues.cu, shared by host and device code.
//
// D[s, r] = sum_k S[s, k] * R[r, k], S contiguous along K, R, too. D is C or its
// transpose: element (s, r) is out[s * out_stride_s + r * out_stride_r].
#pragma once

#include "sm90_params.h"

namespace torch_cubin {

// A matrix of rows seen as rows of V of them, V elements being 16 bytes: these begin equally far
// behind a multiple of 16 bytes. Row V i + c begins at element c * stride + offset of
// row i of that view.
struct ResidueRows {
  // {stride * V elements, V rows each}: of rows whose residue is at least the number of rows modulo
  // V, and of the others, of which there is one more.
  Sm90TensorMap map[2];
  int stride, offset;  // elements; offset: of the operand's first element, below V
  int rows;            // of all batches, which follow one another
  int batch_rows;      // from one batch to the next; 0: all have the same
};

struct ResidueParams {
  ResidueRows s, r;
  void* out;
  const void* bias;  // of columns of C; null: none
  tc_int64 out_stride_s, out_stride_r, out_batch_stride, bias_stride;
  int rows_s, rows_r, k;  // of one batch
  int batch;
  int tiles_s, tiles_r;  // of one residue's rows; of R's
  int splits;            // of K: blocks of a cluster
};

}  // namespace torch_cubin
