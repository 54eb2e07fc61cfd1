// The parameter of groups_simt.cu and groups_mma.cu, shared by host and device code.
// sm90_grouped_params.h defines groups, their ends and wrong ends.
//
//   rows: C[m, n] = sum_k A[m, k] * B[g, k, n] for the rows m of group g; rows past the last end are
//     not written, or with kGroupedZeroRest zero
//   contraction (kGroupedContract): C[g, m, n] = sum_k A[m, k] * B[k, n] over the k of group g
//
// A block computes one tile; blocks past the last tile do nothing.
#pragma once

#include "matmul_params.h"

namespace torch_cubin {

enum GroupedFlags {
  kGroupedWideEnds = 1,  // ends are 64-bit
  kGroupedPair = 2,      // clusters of two blocks along M, each of which loads half of B for both
  kGroupedZeroRest = 4   // rows: those past the last end are zero
};
constexpr int kGroupedContract = 8;

struct GroupedMatmulParams {
  MatmulParams matmul;  // of all rows and all of K; without batch dims, splits and tiles
  const void* ends;
  tc_int64 b_group_stride;  // rows: elements
  int groups;
  int limit;         // the size of the dim that the groups divide
  int m;             // contraction: of a group's product
  int k_blocks;      // rows: 0 without K
  int tiles_n;       // of N
  int tile_columns;  // of a tile
  int raster;        // rows of tiles that follow one another, column by column
  int flags;
};

}  // namespace torch_cubin
