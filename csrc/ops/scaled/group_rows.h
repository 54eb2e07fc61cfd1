// The kernel of csrc/kernels/matmul/group_rows.cu: the rows of tiles of a product of groups.
#pragma once

#include "kernels/matmul/group_rows_params.h"
#include "ops/common/launch.h"

namespace torch_cubin {

// Groups of rows, or of K, whose ends are on the device.
struct Groups {
  const void* ends = nullptr;
  bool wide_ends = false;  // int64
  bool of_k = false;
  int64_t groups = 0;
  int64_t limit = 0;  // the rows, or K, that they divide
  // Of K: the table of find_group_blocks_cuda(); null: the product finds its own by the ends.
  const GroupRow* table = nullptr;

  // Rows of tiles of that height, at most.
  int64_t most_tiles(int64_t height) const { return limit / height + groups; }
};

// The table of rows of tiles, or of groups of K (kernels/matmul/group_rows_params.h), which the
// next kernel of the stream can read. Throws [no_kernel] or [arch] where the device has no such
// kernel.
Workspace find_group_rows(const Device& device, const Groups& groups, int64_t height);

}  // namespace torch_cubin
