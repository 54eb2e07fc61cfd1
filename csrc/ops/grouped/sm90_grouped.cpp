#include "ops/grouped/sm90_grouped.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cubin/error.h"
#include "kernels/matmul/sm90_grouped_params.h"
#include "ops/common/backend.h"
#include "ops/common/cluster_capacity.h"
#include "ops/common/device_tables.h"
#include "ops/common/shape.h"
#include "runtime/tensor_map.h"

namespace torch_cubin {
namespace {

constexpr int64_t kBytes = 2;            // of an element
constexpr int64_t kPanel = 64;           // elements of a box along K, and of an output's box
constexpr int64_t kStoreRows = 16;       // of an output's box
constexpr int64_t kHalves = 2;           // of a tile of B
constexpr int64_t kMapBytes = 16;        // bytes that strides of tensor maps are multiples of
constexpr int64_t kMostTiles = 1 << 30;  // counted in 32 bits

constexpr const char* kLayouts[] = {"nt", "nn", "tn"};

struct GroupedRow {
  explicit GroupedRow(PackageKernel& entry) : kernel(&entry) {
    constexpr const char* kDtypes[] = {"float16", "bfloat16"};
    const KernelFields fields(entry);
    dtype = fields.index("dtype", kDtypes) == 0 ? ScalarType::Half : ScalarType::BFloat16;
    layout = fields.index("layout", kLayouts);
    fields.triple("tile", 1, tile);
    experts = fields.integer("experts", 0, 1) != 0;
    if (tile[1] % (kHalves * kPanel) != 0 || tile[2] != kPanel) {
      fields.refuse("tile", "multiples of 128 columns, and 64 of K");
    }
  }

  PackageKernel* kernel;
  ScalarType dtype;
  int layout;  // of kLayouts
  int64_t tile[3];
  bool experts;  // whether it has the options of rows
};

const RowBackend<GroupedRow, Sm90GroupedParams> g_sm90_grouped("matmul/sm90_grouped", "grouped",
                                                               {"sm90_grouped"});

struct GroupedTable {
  explicit GroupedTable(const Device& device)
      : family("grouped", device), rows(g_sm90_grouped.rows(family)) {}
  FamilyKernels family;
  std::vector<GroupedRow> rows;
  ClusterCapacity clusters{2};
};

const GroupedTable& grouped_table(const Device& device) {
  static DeviceTables<GroupedTable> tables;
  return tables.get(device);
}

struct GroupedPlan {
  const GroupedRow* row = nullptr;
  bool pair = false;
  int64_t tiles = 0;  // at most, of a cluster
  double cost = std::numeric_limits<double>::infinity();
};

// Columns of the outputs of a tile.
int64_t tile_columns(const GroupedRow& row, const GroupedCall& call) {
  return call.is_gated() ? row.tile[1] / kHalves : row.tile[1];
}

// Outputs that a tile computes in a unit of time, for each k, as parts of the quickest tile's.
double rate_of(const GroupedRow& row, bool pair) {
  const bool wide = row.tile[1] > 2 * kPanel;
  if (row.tile[0] <= kPanel) return wide ? 0.85 : 0.6;
  return (wide ? 1.0 : 0.96) * (pair ? 1.02 : 1.0);
}

// Outputs that the quickest tile computes in the time in which a block's part of the memory's
// bandwidth reads a column of B, for each k.
constexpr double kOutputsPerColumn = 157;

// The host does not know the groups' sizes: it plans for equal ones, whose last tile is half full.
void price(GroupedPlan& plan, const GroupedCall& call, int64_t clusters) {
  const GroupedRow& row = *plan.row;
  const int64_t height = row.tile[0] * (plan.pair ? 2 : 1);
  const int64_t tiles_n = ceil_div(call.n, tile_columns(row, call));
  const auto of_height = [&](int64_t rows) {
    return static_cast<double>(rows) / static_cast<double>(height);
  };
  double likely, tiles_m;  // of all groups; of one
  if (call.contraction) {
    plan.tiles = ceil_div(call.m, height) * call.groups * tiles_n;
    tiles_m = static_cast<double>(ceil_div(call.m, height));
    likely = static_cast<double>(plan.tiles);
  } else {
    plan.tiles = (ceil_div(call.m, height) + call.groups + 1) * tiles_n;
    const int64_t groups = std::min(call.groups, call.m);
    tiles_m = std::max(1.0, of_height(call.m) / static_cast<double>(groups) + 0.5);
    likely = tiles_m * static_cast<double>(groups * tiles_n);
  }
  const auto outputs = static_cast<double>(row.tile[0] * row.tile[1]);
  const double reads = kOutputsPerColumn * static_cast<double>(row.tile[1]) / tiles_m;
  // The small parts decide between tiles of which the memory allows equally many.
  const double cost = std::max(outputs / rate_of(row, plan.pair), reads) + outputs / 16 + 256;
  plan.cost = std::ceil(likely / static_cast<double>(clusters)) * cost;
}

GroupedPlan plan_grouped(const GroupedTable& table, const Device& device, const GroupedCall& call) {
  const int layout = call.contraction ? 2 : call.b_mn_major ? 1 : 0;
  GroupedPlan best;
  for (const GroupedRow& row : table.rows) {
    if (row.dtype != call.dtype || row.layout != layout) continue;
    if (!row.experts && call.has_options()) continue;
    for (const bool pair : {false, true}) {
      if (pair && table.clusters.ask(*row.kernel, device) < 2) continue;
      GroupedPlan plan;
      plan.row = &row;
      plan.pair = pair;
      price(plan, call, device.multiprocessors / (pair ? 2 : 1));
      if (plan.tiles <= kMostTiles && plan.cost < best.cost) best = plan;
    }
  }
  if (best.row == nullptr) {
    table.family.fail_no_kernel("grouped_matmul of " + dtype_name(call.dtype) + ", layout " +
                                kLayouts[layout]);
  }
  return best;
}

struct Box {
  int64_t columns, rows;
};

void encode(Sm90GroupedMap& map, const char* data, ScalarType dtype, Box size, int64_t stride,
            Box box, const Device& device, int64_t groups = 0, int64_t group_stride = 0) {
  const auto dim = [](int64_t size, int64_t stride, int64_t box) {
    return MapDim{static_cast<uint64_t>(size), static_cast<uint64_t>(stride * kBytes),
                  static_cast<uint32_t>(box)};
  };
  const MapType type = dtype == ScalarType::Half ? MapType::kFloat16 : MapType::kBFloat16;
  const MapDim columns = dim(size.columns, 0, box.columns), rows = dim(size.rows, stride, box.rows);
  if (groups == 0) {
    encode_tiled_map(&map, data, type, MapSwizzle::k128Bytes, {columns, rows}, device.index);
  } else {
    const MapDim one = dim(1, 0, 1);
    encode_tiled_map(&map, data, type, MapSwizzle::k128Bytes,
                     {columns, rows, dim(groups, group_stride, 1), one, one}, device.index);
  }
}

}  // namespace

void run_sm90_grouped(const Device& device, const GroupedCall& call) {
  const GroupedPlan plan = plan_grouped(grouped_table(device), device, call);
  const GroupedRow& row = *plan.row;
  Sm90GroupedParams params{};
  if (call.rows != nullptr) {
    params.flags |= kGroupedGather;
    params.rows = call.rows;
    params.a_rows = call.a;
    params.a_stride = call.a_stride;
    params.a_height = static_cast<int>(call.a_height);
    params.k = static_cast<int>(call.k);
  } else {
    // Rows that do not exist are no part of the box: copies of boxes with many of them are slow.
    const int64_t a_rows = call.contraction ? row.tile[0] : std::min(row.tile[0], call.m);
    const Box a_size = call.contraction ? Box{call.m, call.k} : Box{call.k, call.m};
    encode(params.a, call.a, call.dtype, a_size, call.a_stride,
           {kPanel, call.contraction ? kPanel : a_rows}, device);
    params.stage_bytes = static_cast<int>((a_rows + row.tile[1]) * kPanel * kBytes);
  }
  const int64_t b_columns = call.is_gated() ? kHalves * call.n : call.n;
  const Box b_size = call.b_mn_major ? Box{b_columns, call.k} : Box{call.k, b_columns};
  encode(params.b, call.b, call.dtype, b_size, call.b_stride,
         {kPanel, call.b_mn_major ? kPanel : row.tile[1] / kHalves}, device,
         call.contraction ? 1 : call.groups, call.b_group_stride);
  const int64_t out_groups = call.contraction ? call.groups : 1;
  const bool aligned =
      call.n * kBytes % kMapBytes == 0 && reinterpret_cast<uintptr_t>(call.out) % kMapBytes == 0;
  if (aligned) {
    encode(params.out_map, call.out, call.dtype, {call.n, call.m}, call.n, {kPanel, kStoreRows},
           device, out_groups, call.m * call.n);
  } else {
    params.flags |= kGroupedOutUnaligned;
  }
  params.out_rows = call.out_rows;
  params.scale = call.scale;
  params.bias = call.bias;
  params.ends = call.ends;
  params.out = call.out;
  params.out_stride = call.n;
  params.out_group_stride = call.m * call.n;
  params.groups = static_cast<int>(call.groups);
  params.limit = static_cast<int>(call.limit());
  params.m = static_cast<int>(call.m);
  params.n = static_cast<int>(call.n);
  params.k_blocks = static_cast<int>(ceil_div(call.k, kPanel));
  const int64_t columns = tile_columns(row, call);
  params.tiles_n = static_cast<int>(ceil_div(call.n, columns));
  params.tile_columns = static_cast<int>(columns);
  const bool halves = call.is_gated() && !call.gating.interleaved;
  params.half_columns = static_cast<int>(halves ? call.n : row.tile[1] / kHalves);
  params.flags |= call.gating.activation << kGroupedActivation;
  if (call.gating.interleaved) params.flags |= kGroupedInterleaved;
  params.curve = kActivationCurves[call.gating.activation];
  params.raster = static_cast<int>(kGroupedRaster);
  if (call.wide_ends) params.flags |= kGroupedWideEnds;
  if (call.zero_rest) params.flags |= kGroupedZeroRest;
  if (plan.pair) params.flags |= kGroupedPair;
  const int64_t size = plan.pair ? 2 : 1;
  const int64_t clusters = std::min(plan.tiles, device.multiprocessors / size);
  launch(*row.kernel, {clusters * size, 1, 1, size}, device, params);
}

}  // namespace torch_cubin
