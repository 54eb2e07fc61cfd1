// Blocks of rows of groups, each with a scale, which group_rows.cu finds and quantize/tiles.cu
// reads.
#pragma once

namespace torch_cubin {

constexpr int kGroupBlock = 128;  // rows

// The first entry of a table has their number in m0. The others are the blocks, in the order of the
// groups: rows from m0 to m_end, of one group, whose first block begins with its first row. In the
// operand of a product of groups of K they are at K from `to` to `to_end`, with zeros after the
// last row.
struct alignas(16) GroupBlock {
  int m0, m_end;
  int to, to_end;
};

}  // namespace torch_cubin
