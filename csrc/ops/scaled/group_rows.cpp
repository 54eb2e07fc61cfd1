#include "ops/scaled/group_rows.h"

#include <algorithm>

#include "ops/common/backend.h"
#include "ops/common/device_tables.h"
#include "ops/scaled/group_blocks.h"

namespace torch_cubin {
namespace {

// Rows of tiles of a group that follow one another, column by column, at most.
constexpr int64_t kBand = 16;

class GroupRowsBackend : public KernelBackend {
 public:
  GroupRowsBackend() : KernelBackend("groups") {}

  void check(PackageKernel& kernel) const override {
    check_params(kernel.entry(), "matmul/group_rows", sizeof(GroupRowsParams));
  }
};

const GroupRowsBackend g_group_rows;

struct GroupRowsTable {
  explicit GroupRowsTable(const Device& device) : family("groups", device) {
    family.for_each_backend<KernelBackend>(
        [&](const KernelBackend&, const auto& kernels) { kernel = kernels.front(); });
    if (kernel == nullptr) family.fail_no_kernel("the rows of tiles of groups");
  }
  FamilyKernels family;
  PackageKernel* kernel = nullptr;
};

PackageKernel& group_rows_kernel(const Device& device) {
  static DeviceTables<GroupRowsTable> tables;
  return *tables.get(device).kernel;
}

}  // namespace

Workspace find_group_rows(const Device& device, const Groups& groups, int64_t height) {
  const int64_t entries = 1 + (groups.of_k ? groups.groups : groups.most_tiles(height));
  Workspace rows(device, entries * static_cast<int64_t>(sizeof(GroupRow)));
  GroupRowsParams params{};
  params.ends = groups.ends;
  params.rows = reinterpret_cast<GroupRow*>(rows.data());
  params.groups = static_cast<int>(groups.groups);
  params.limit = static_cast<int>(groups.limit);
  params.height = static_cast<int>(height);
  params.band = static_cast<int>(kBand);
  params.wide_ends = groups.wide_ends;
  params.of_k = groups.of_k;
  launch(group_rows_kernel(device), {1}, device, params);
  return rows;
}

GroupBlocks find_group_blocks_cuda(const Tensor& ends, int64_t rows) {
  // Where a group begins in K: at a line of the L2 cache, or of few rows in a group at what tensor
  // maps need, so that 8-bit operands take no more memory than 16-bit rows.
  constexpr int64_t kLine = kGroupBlock, kLeast = 16;
  const TensorView view(ends);
  const int64_t groups = view.sizes[0], align = rows >= kLine * groups ? kLine : kLeast;
  const auto parts = [&](int64_t size) { return std::min(rows, rows / size + groups); };
  const int64_t most = parts(kGroupBlock), k = parts(align) * align;
  static_assert(sizeof(GroupRow) == sizeof(GroupBlock));
  const int64_t bytes = (2 + groups + most) * static_cast<int64_t>(sizeof(GroupRow));
  const Tensor tables = empty_cuda(&bytes, 1, ScalarType::Byte, view.device_index);
  GroupRowsParams params{};
  params.ends = view.data();
  params.rows = static_cast<GroupRow*>(tables.mutable_data_ptr());
  params.blocks = reinterpret_cast<GroupBlock*>(params.rows + 1 + groups);
  params.groups = static_cast<int>(groups);
  params.limit = static_cast<int>(rows);
  params.align = static_cast<int>(align);
  params.of_k = 1;
  const Device& own = device(view.device_index);
  launch(group_rows_kernel(own), {1}, own, params);
  return {ends, groups, rows, most, k, tables};
}

}  // namespace torch_cubin
