// The rows of tiles of a product of groups, or its groups of K, which group_rows.cu finds and
// sm90_scaled.cu reads.
#pragma once

namespace torch_cubin {

// The first entry of a table has their number in m0. The others are the rows of tiles, in the order
// of the groups: rows from m0 to m_end at most, of one group, or of none if an end was wrong, where
// results are NaN. Groups of K are entries each: K from m0 to m_end, or both 0. Of these `group` is
// the number of their first block of scales, and with `place` 1 the group begins with that block,
// else the block with a multiple of 128 of K.
//
// Each row of tiles is one of a band's, which blocks compute column by column: `height` rows of one
// group, of which it is the one at `place`; backwards, from the last column to the first.
struct alignas(16) GroupRow {
  int m0, m_end;
  int group;
  unsigned char is_wrong, height, place, backwards;
};

}  // namespace torch_cubin
