// The kernel of csrc/kernels/matmul/group_rows.cu: the rows of tiles of a product of groups.
#pragma once

#include "kernels/matmul/group_rows_params.h"
#include "ops/common/launch.h"

namespace torch_cubin {

// Groups of rows, whose ends are on the device.
struct GroupsOfRows {
  const void* ends = nullptr;
  bool wide_ends = false;  // int64
  int64_t groups = 0, rows = 0;

  // Rows of tiles of that height, at most.
  int64_t most_tiles(int64_t height) const { return rows / height + groups; }
};

// The table of rows of tiles (kernels/matmul/group_rows_params.h), which the next kernel of the
// stream can read. Throws [no_kernel] or [arch] where the device has no such kernel.
Workspace find_group_rows(const Device& device, const GroupsOfRows& groups, int64_t height);

}  // namespace torch_cubin
