#include "ops/scaled/group_rows.h"

#include "ops/common/backend.h"
#include "ops/common/device_tables.h"

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

}  // namespace

Workspace find_group_rows(const Device& device, const Groups& groups, int64_t height) {
  static DeviceTables<GroupRowsTable> tables;
  const GroupRowsTable& table = tables.get(device);
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
  launch(*table.kernel, {1}, device, params);
  return rows;
}

}  // namespace torch_cubin
