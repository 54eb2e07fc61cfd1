// The parameter of the kernels of sm90_grouped.cu, shared by host and device code.
//
// Groups follow one another along one dim of the operands; group g begins where g - 1 ends (the
// first one at 0) and ends at ends[g], which is read on the device:
//   rows (layouts nt and nn): out[m, n] = round(sum_k A[m, k] * B[g, k, n]) for the rows m of group
//     g; rows past the last end are not written, or with kGroupedZeroRest zero
//   contraction (layout tn): out[g, m, n] = round(sum_k A[m, k] * B[k, n]) over the k of group g
// Rows have options:
//   kGroupedGather: A[rows[m], k] in place of A[m, k]; a row that A does not have is zero
//   bias: of the dtype, bias[g, n] is added to the sum
//   an activation (activation_params.h): B[g] and its bias have two halves of n columns, of which g
//     and u are the sums, and out[m, n] = round(activation(g) * u); with kGroupedInterleaved g are
//     the sums of even columns, and u those of odd ones
//   scale: the value is multiplied by scale[m] before it is rounded
//   out_rows: it goes to out[out_rows[m], n]; a row that out does not have is not stored
//
// An end is wrong if it is less than the one before it or more than `limit`. From the first wrong
// one on all is NaN: the rows from the group's beginning to `limit`, or the outputs of that group
// and of those after it.
//
// Tensor maps, innermost dim first, swizzled by 128 bytes; boxes in parentheses:
//   A: nt, nn {K (64), M (tile M, or M if that is less)}; tn {M (64), K (64)}
//   B: nt {K (64), N (tile N / 2), groups (1)}; nn {N (64), K (64), groups (1)}; tn the same of one
//     group. A tile is two boxes along N (of nt), half_columns apart
//   out: {N (64), M (16), groups (1)}; rows have one group
// B and out have two more dims, of size 1.
#pragma once

#include "activation_params.h"
#include "groups_params.h"

namespace torch_cubin {

struct alignas(64) Sm90GroupedMap {
  unsigned long long words[16];
};

enum Sm90GroupedFlags {      // and those of GroupedFlags
  kGroupedOutUnaligned = 8,  // out has no map: its rows are not multiples of 16 bytes
  kGroupedGather = 16,       // the kernel reads A's rows without a map
  kGroupedActivation = 5,    // the gate's activation is at bits 5 to 7
  kGroupedInterleaved = 256
};

struct Sm90GroupedParams {
  Sm90GroupedMap a, b, out_map;
  const void* ends;
  void* out;
  const int* rows;  // gather: a row of A for each row
  // Null without the option.
  const int* out_rows;
  const float* scale;
  const void* bias;
  const void* a_rows;  // gather: A, contiguous along K, rows at multiples of 16 bytes
  long long a_stride;  // gather: elements, of a row of A
  long long out_stride, out_group_stride;  // elements, of a row and of a group of outputs
  int groups;
  int limit;        // the size of the dim that the groups divide
  int m, n;         // of the output, or of a group's
  int k_blocks;     // rows: of 64
  int a_height, k;  // gather: of A
  int tiles_n;
  int tile_columns;  // outputs of a tile: tile N, or half of it with an activation
  int half_columns;  // from the first box of B of a tile to the second
  int raster;        // rows of tiles that follow one another, column by column
  int stage_bytes;   // that the TMA writes to a stage, where A has a map
  int flags;
  ActivationCurve curve;
};

}  // namespace torch_cubin
