#include "ops/grouped/portable.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "cubin/error.h"
#include "kernels/matmul/groups_params.h"
#include "ops/common/backend.h"
#include "ops/common/device_tables.h"
#include "ops/common/shape.h"
#include "pytorch/settings.h"

namespace torch_cubin {
namespace {

constexpr const char* kMaths[] = {"float32", "tf32", "float64"};

int math_of(ScalarType dtype) { return dtype == ScalarType::Double ? 2 : tf32_allowed() ? 1 : 0; }

struct PortableGroupedRow {
  PortableGroupedRow() = default;
  explicit PortableGroupedRow(PackageKernel& entry) : kernel(&entry) {
    const KernelFields fields(entry);
    math = fields.index("math", kMaths);
    fields.triple("tile", 1, tile);
  }

  PackageKernel* kernel = nullptr;
  int math = 0;  // of kMaths
  int64_t tile[3] = {};
};

const RowBackend<PortableGroupedRow, GroupedMatmulParams> g_portable_grouped(
    "matmul/groups", "grouped", {"groups_simt", "groups_mma"});

// One kernel a math: a row's bits must not depend on the other groups, which a choice would.
struct PortableGroupedTable {
  explicit PortableGroupedTable(const Device& device) : family("grouped", device) {
    for (const PortableGroupedRow& row : g_portable_grouped.rows(family)) rows[row.math] = row;
  }
  FamilyKernels family;
  PortableGroupedRow rows[std::size(kMaths)];
};

const PortableGroupedTable& portable_table(const Device& device) {
  static DeviceTables<PortableGroupedTable> tables;
  return tables.get(device);
}

// Blocks that any sizes of the groups need at most.
int64_t most_tiles(const PortableGroupedRow& row, const GroupedCall& call) {
  const int64_t tiles_m = ceil_div(call.m, row.tile[0]), tiles_n = ceil_div(call.n, row.tile[1]);
  return (call.contraction ? tiles_m * call.groups : tiles_m + call.groups + 1) * tiles_n;
}

// Strides of an operand with the two dims that are contiguous along the first.
MatmulParams product_of(const GroupedCall& call) {
  MatmulParams p{};
  p.a = call.a;
  p.b = call.b;
  p.c = call.out;
  p.m = call.m;
  p.n = call.n;
  p.k = call.k;
  p.a_stride_m = call.contraction ? 1 : call.a_stride;
  p.a_stride_k = call.contraction ? call.a_stride : 1;
  p.b_stride_n = call.b_mn_major ? 1 : call.b_stride;
  p.b_stride_k = call.b_mn_major ? call.b_stride : 1;
  p.c_stride_m = call.n;
  p.c_stride_n = 1;
  p.batch = 1;
  std::fill(std::begin(p.batch_size), std::end(p.batch_size), 1);
  p.splits = 1;
  return p;
}

}  // namespace

void run_portable_grouped(const Device& device, const GroupedCall& call) {
  const PortableGroupedTable& table = portable_table(device);
  const int math = math_of(call.dtype);
  const PortableGroupedRow& row = table.rows[math];
  if (row.kernel == nullptr) {
    table.family.fail_no_kernel(std::string("grouped_matmul of ") + kMaths[math]);
  }
  const int64_t blocks = most_tiles(row, call);
  if (blocks > INT32_MAX) {
    fail({"no_kernel", "grouped_matmul", "has more tiles than a kernel takes",
          "at most " + std::to_string(INT32_MAX), std::to_string(blocks), "Pass fewer groups."});
  }
  GroupedMatmulParams params{};
  params.matmul = product_of(call);
  params.ends = call.ends;
  params.b_group_stride = call.b_group_stride;
  params.groups = static_cast<int>(call.groups);
  params.limit = static_cast<int>(call.limit());
  params.m = static_cast<int>(call.m);
  params.k_blocks = 1;
  params.tiles_n = static_cast<int>(ceil_div(call.n, row.tile[1]));
  params.tile_columns = static_cast<int>(row.tile[1]);
  params.raster = static_cast<int>(kGroupedRaster);
  if (call.wide_ends) params.flags |= kGroupedWideEnds;
  if (call.zero_rest) params.flags |= kGroupedZeroRest;
  if (call.contraction) params.flags |= kGroupedContract;
  launch(*row.kernel, {blocks}, device, params);
}

}  // namespace torch_cubin
