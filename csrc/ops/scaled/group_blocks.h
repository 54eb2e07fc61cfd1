// Gradients of weights of groups: products of groups of K (ops/scaled/scaled.h) whose scales belong
// to up to 128 rows of one group each, the first of them beginning with its first row.
//
// Operands have a group's rows one after the other along K, and zeros up to where the next group
// begins. Nothing waits for the groups' ends, which the device knows.
#pragma once

#include "ops/scaled/scaled.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// The blocks of rows that groups divide.
struct GroupBlocks {
  Tensor ends;  // of the groups, int32, contiguous; all are right
  int64_t groups, rows;
  int64_t most;  // blocks, at most
  int64_t k;     // of the operands, at most
  // CUDA: two tables of group_rows.cu, of the groups of K, and of the blocks. CPU: the ends in K.
  Tensor tables;
};

GroupBlocks find_group_blocks_cpu(const Tensor& ends, int64_t rows);
GroupBlocks find_group_blocks_cuda(const Tensor& ends, int64_t rows);

// out[g] = a[:, k] @ b[:, k].t() for the k of group g, (groups, M, N), of operands (M, k) and (N,
// k) that quantize_groups() of ops/quantize/quantize.h made.
Tensor group_blocks_product_cpu(const Quantized& a, const Quantized& b, const GroupBlocks& blocks,
                                ScalarType dtype);
decltype(group_blocks_product_cpu) group_blocks_product_cuda;

}  // namespace torch_cubin
