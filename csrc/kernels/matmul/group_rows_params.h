// The parameter of group_rows.cu, shared by host and device code.
//
// Group g has the rows from ends[g - 1] (the first one from 0) to ends[g], in rows of tiles of
// `height` rows each; the last may be shorter. An end is wrong if it is less than the one before it
// or more than `limit`: then the rows from the group's beginning to `limit` are its own, marked,
// and the following groups have none.
//
// Bands have at most `band` rows of tiles, and those of a group are equal but for the last.
//
// With of_k the table has the groups themselves, those from the first wrong end on marked.
//
// With `blocks` it has the groups of another K, in which each begins at a multiple of `align` and
// with a block of its own, and `blocks` gets these. There are no blocks from the first wrong end
// on.
#pragma once

#include "../common/group_blocks.h"
#include "group_rows.h"

namespace torch_cubin {

struct GroupRowsParams {
  const void* ends;
  GroupRow* rows;  // 1 + groups + limit / height at most; of_k: 1 + groups
  int groups, limit, height, band;
  int wide_ends;  // 64-bit
  int of_k;
  GroupBlock* blocks;  // 1 + groups + limit / kGroupBlock at most; null: none
  int align;           // of blocks: at most kGroupBlock, which it divides
};

}  // namespace torch_cubin
