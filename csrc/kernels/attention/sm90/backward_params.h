// The parameter of the three kernels of attention's backward on Hopper, shared by host and device
// code: sm90/backward_delta.cu, sm90/backward.cu or sm90/backward_wide.cu,
// sm90/backward_convert.cu, in this order; for packed sequences after sm90/order.cu, for masks
// after sm90/backward_mask.cu or sm90/backward_added_mask.cu.
//
// Row i attends to column j if  i + first <= j <= i + last  and j < seqlen_k.
//
// q, k, v and grad_out are described by tensor maps, see sm90/forward_params.h. Boxes: {64,
// tile_rows, 1, 1, 1} for q and grad_out, {64, tile_keys, 1, 1, 1} for k and v; half of the keys
// for kernels whose blocks work in pairs; {64, kMapRows, 1, 1, 1} for dk and dv.
//
// Tiles of queries are numbered within each head of each batch; in packed sequences, from
// first_query_tile() of sm90/backward_dq.cuh on, within each head.
#pragma once

#include "forward_params.h"

namespace torch_cubin {

constexpr int kMapRows = 16;     // of dk and dv that a warp stores at a time
constexpr int kMaskChunk = 512;  // keys of a block of sm90/backward_mask.cu

// A mask in the layout of sm90/backward_mask.cu or, if it is additive, sm90/backward_added_mask.cu.
struct Sm90MaskSteps {
  // [batch][head][tile][key tile][thread][word]: for a boolean mask a bit for each of a thread's
  // scores, if the step hides some. Or [batch][head][tile][key tile][vector][thread], vectors of 16
  // bytes: numbers to add.
  unsigned* words;
  // Null without a mask. [batch][head][key tile][tile]: a Sm90StepClass in the lowest
  // kStepClassBits. Above them, from sm90/backward_delta.cu, the number of earlier key tiles that
  // take the step. Keys to which a mask adds a nonzero number count as partly hidden.
  unsigned* steps;
  int batches, heads, tiles;  // the mask's; 1 if it is shared
};

struct Sm90BackwardParams {
  Sm90AttentionMap q, k, v, grad_out;
  Sm90AttentionMap dk_map, dv_map;  // not for heads of more than 128 columns

  // Between the kernels, for each tile of tile_rows queries:
  float* sums;    // [2][tile_rows]: logsumexp * logsumexp_unit, and delta
  float* dq_sum;  // [tile_columns, up to a multiple of 64][tile_rows], see sm90/backward_dq.cuh
  int* turns;     // number of blocks that have added to dq_sum; for pairs, 16 bits for each block
  unsigned*
      ticket;  // for the whole grid: work items that the blocks of sm90/backward.cu have taken
  float* part_sums;  // dk and dv of each work item, see sm90/backward_parts.cuh; null: one part

  const void* out;            // used with grad_out, for delta
  const void* grad_out_rows;  // the tensor that the map describes
  const float* logsumexp;     // a float a row
  const Sm90Order* order;     // of packed sequences' tiles of keys; else null
  void* dq;                   // all of these: rows of 16-byte vectors
  void* dk;
  void* dv;
  tc_int64 out_stride[3];  // batch, head, row; in elements; packed sequences have 0 for batch
  tc_int64 grad_out_stride[3], dq_stride[3], dk_stride[3], dv_stride[3];
  tc_int64 logsumexp_stride[2];  // batch, head
  Sm90Lengths lengths;
  int batch, heads, group;
  int head_dim, head_dim_v;  // of the tensors, multiples of 8
  // Of a step: queries, keys, and the kernel's head_dim.
  int tile_rows, tile_keys, tile_columns;
  int tiles, key_tiles;  // along the queries and the keys; packed: an upper bound
  int parts;             // work items that share the queries of a tile of keys
  // Tiles of keys in a set of those that add to the same dq_sum, and the number of sets. Each has
  // `query_tiles` sums and turns of its own, one set's after the other's.
  int set_keys, sets, query_tiles;
  int together;  // parts of heads of keys whose blocks run concurrently, a multiple of parts
  float scale,
      unit;  // unit: scale * log2(e), a positive normal number; not used by general kernels
  // log2(e); 1 for kernels that take score rules or added masks, also in calls without any.
  float logsumexp_unit;
  Sm90ScoreRule score;  // of `general` kernels

  // Null, or, for the kernels that convert it, a value for each score: a byte, where 0 hides, or a
  // number to add, of q's type or a float.
  const void* mask;
  tc_int64 mask_stride[4];  // batch, head, row, key; in elements
  int mask_added, mask_floats;
  unsigned minus_infinity;  // the bits of -inf
  Sm90MaskSteps bits;
};

}  // namespace torch_cubin
