#include "ops/scaled/sm90_scaled.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "cubin/error.h"
#include "kernels/matmul/sm90_scaled_params.h"
#include "ops/common/backend.h"
#include "ops/common/device_tables.h"
#include "ops/common/shape.h"
#include "ops/matmul/plan.h"
#include "ops/scaled/scaled.h"
#include "runtime/tensor_map.h"

namespace torch_cubin {
namespace {

constexpr int64_t kTileK = 128;       // elements, and bytes
constexpr int64_t kPanelBytes = 128;  // of an output's box
constexpr int64_t kStoreRows = 16;    // of an output's box
constexpr int64_t kGroup = 8;         // rows of tiles that follow one another
constexpr int64_t kMapBytes = 16;     // bytes that strides of tensor maps are multiples of
constexpr int64_t kMostTiles = 1 << 30;

// Which sums a kernel computes: all of K by the tensor cores; each 128 of K in float32; the same,
// with scales for single columns of B's blocks.
enum Sums { kFast, kPromoted, kColumns };
constexpr const char* kSums[] = {"fast", "promoted", "columns"};

// What groups divide, as kernels' tables number it.
enum Grouped { kOneProduct, kGroupsOfRows, kGroupsOfK };

Grouped grouped_of(const ScaledCall& call) {
  if (call.groups.groups == 0) return kOneProduct;
  return call.groups.of_k ? kGroupsOfK : kGroupsOfRows;
}

ScalarType dtype_of(const KernelFields& fields, const char* name) {
  constexpr const char* kTypes[] = {"e4m3", "e5m2"};
  return fields.index(name, kTypes) == 0 ? ScalarType::Float8_e4m3fn : ScalarType::Float8_e5m2;
}

struct ScaledRow {
  explicit ScaledRow(PackageKernel& entry) : kernel(&entry) {
    const KernelFields fields(entry);
    a_dtype = dtype_of(fields, "a");
    b_dtype = dtype_of(fields, "b");
    sums = fields.index("math", kSums);
    grouped = static_cast<Grouped>(fields.integer("grouped", kOneProduct, kGroupsOfK));
    gated = fields.integer("gated", 0, 1) == 1;
    fields.triple("tile", 1, tile);
    const KernelFields cost = fields.object("cost");
    k_tile_cost = cost.number("k_tile", 0);
    fixed_cost = cost.number("fixed", 0);
    once_cost = cost.number("once", 0, 0);
    if (tile[1] % 8 != 0 || tile[2] != kTileK) {
      fields.refuse("tile", "multiples of 8 columns, and 128 of K");
    }
  }

  PackageKernel* kernel;
  ScalarType a_dtype, b_dtype;
  int sums;
  Grouped grouped;
  bool gated;  // a tile has the gates and the ups of half as many outputs
  int64_t tile[3];
  double k_tile_cost = 0, fixed_cost = 0;  // nanoseconds, of a tile
  double once_cost = 0;                    // of a call
};

const RowBackend<ScaledRow, Sm90ScaledParams> g_sm90_scaled("matmul/sm90_scaled", "scaled",
                                                            {"sm90_scaled"});

struct ScaledTable {
  explicit ScaledTable(const Device& device)
      : family("scaled", device), rows(g_sm90_scaled.rows(family)) {}
  FamilyKernels family;
  std::vector<ScaledRow> rows;
};

const ScaledTable& scaled_table(const Device& device) {
  static DeviceTables<ScaledTable> tables;
  return tables.get(device);
}

struct ScaledPlan {
  const ScaledRow* row = nullptr;
  int64_t tiles_m = 0, tiles_n = 0;
  double cost = std::numeric_limits<double>::infinity();
};

// Of a tile's columns, those of the output, and so of a box of B.
int64_t out_columns(const ScaledRow& row) { return row.gated ? row.tile[1] / 2 : row.tile[1]; }

// Bytes that the memory reads or writes in a nanosecond, on an H200.
constexpr double kMemoryBytes = 3900;

// Whether all rows of both operands begin at a line of the L2 cache.
bool has_whole_lines(const ScaledCall& call) {
  const auto begins = [](const void* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % kTileK == 0 && stride % kTileK == 0;
  };
  return begins(call.a, call.a_stride) && begins(call.b, call.b_stride);
}

// Nanoseconds in which a block loads 128 bytes of a row that lie in two lines of the L2 cache: two
// requests, as long as for 256 bytes.
constexpr double kTwoLinesCost = 2.6;

constexpr double kLaunchCost = 2000;  // of a kernel that follows another one, nanoseconds

// In nanoseconds: the slower of all waves of tiles and of the memory. A part of the former decides
// between tiles for which the memory takes equally long.
void price(ScaledPlan& plan, const ScaledCall& call, int64_t multiprocessors) {
  const ScaledRow& row = *plan.row;
  plan.tiles_n = ceil_div(call.n, out_columns(row));
  int64_t matrices = 1, likely;     // B that are read; rows of tiles
  int64_t outputs = 1, k = call.k;  // of each group of K
  double k_tile_cost = row.k_tile_cost;
  if (row.grouped == kGroupsOfK) {
    outputs = call.groups.groups;
    k = ceil_div(call.k, outputs) + kTileK / 2;  // the last block is half full
    if (!has_whole_lines(call)) {
      const auto rows = static_cast<double>(row.tile[0] + row.tile[1]);
      k_tile_cost = std::max(k_tile_cost, rows * kTwoLinesCost);
    }
    plan.tiles_m = ceil_div(call.m, row.tile[0]);
    likely = plan.tiles_m * outputs;
  } else if (row.grouped == kGroupsOfRows) {
    plan.tiles_m = call.groups.most_tiles(row.tile[0]);
    // The host does not know the groups' sizes. Their last tiles are full if the sizes are
    // multiples of tiles, half full if they are random: it plans for a quarter of a tile that is
    // empty.
    matrices = std::min(call.groups.groups, call.m);
    likely = std::max(matrices, ceil_div(4 * call.m + row.tile[0] * matrices, 4 * row.tile[0]));
  } else {
    likely = plan.tiles_m = ceil_div(call.m, row.tile[0]);
  }
  const int64_t waves = ceil_div(likely * plan.tiles_n, multiprocessors);
  const auto k_tiles = static_cast<double>(ceil_div(k, kTileK));
  const double compute =
      static_cast<double>(waves) * (k_tiles * k_tile_cost + row.fixed_cost) + row.once_cost;
  const int64_t out_bytes = row.gated ? 1 : element_size(call.out_dtype);
  const int64_t b_rows = row.gated ? 2 * call.n : call.n;
  const auto bytes =
      static_cast<double>(call.m) * static_cast<double>(call.k + out_bytes * call.n * outputs) +
      static_cast<double>(matrices * b_rows) * static_cast<double>(call.k);
  plan.cost = std::max(compute, bytes / kMemoryBytes) + compute / 16;
}

// At most.
int64_t tiles_of(const ScaledPlan& plan, const ScaledCall& call) {
  return plan.tiles_m * plan.tiles_n * (call.groups.of_k ? call.groups.groups : 1);
}

bool serves(const ScaledRow& row, const ScaledCall& call, Sums sums) {
  // A part has one scale of B's blocks.
  const bool has_scales = sums != kPromoted || !call.blocks || kTileK % out_columns(row) == 0;
  return row.a_dtype == call.a_dtype && row.b_dtype == call.b_dtype && row.sums == sums &&
         row.grouped == grouped_of(call) && row.gated == call.gated && has_scales;
}

// The same for all sizes, so that a row's bits do not depend on the other rows.
Sums sums_of(const ScaledTable& table, const ScaledCall& call) {
  if (call.blocks && !call.b_scales.of_128_rows) return kColumns;
  const bool fast =
      call.fast && std::any_of(table.rows.begin(), table.rows.end(),
                               [&](const ScaledRow& row) { return serves(row, call, kFast); });
  return fast ? kFast : kPromoted;
}

ScaledPlan plan_scaled(const ScaledTable& table, const Device& device, const ScaledCall& call) {
  const Sums sums = sums_of(table, call);
  const std::string& forced = forced_config();
  ScaledPlan best;
  for (const ScaledRow& row : table.rows) {
    if (!serves(row, call, sums)) continue;
    ScaledPlan plan;
    plan.row = &row;
    price(plan, call, device.multiprocessors);
    if (tiles_of(plan, call) > kMostTiles) continue;
    if (row.kernel->entry().name == forced) {
      plan.cost = 0;
      return plan;
    }
    if (plan.cost < best.cost) best = plan;
  }
  return best;
}

ScaledPlan plan_or_fail(const ScaledTable& table, const Device& device, const ScaledCall& call) {
  const ScaledPlan plan = plan_scaled(table, device, call);
  if (plan.row == nullptr) {
    const Sums sums = sums_of(table, call);
    table.family.fail_no_kernel(std::string(call.groups.groups > 0 ? kScaledGroupedOp : kScaledOp) +
                                " of " + dtype_name(call.a_dtype) + " and " +
                                dtype_name(call.b_dtype) + " (" + kSums[sums] + " sums)");
  }
  return plan;
}

MapDim dim(int64_t size, int64_t stride_bytes, int64_t box) {
  return {static_cast<uint64_t>(size), static_cast<uint64_t>(stride_bytes),
          static_cast<uint32_t>(box)};
}

Sm90ScaledType type_of(ScalarType dtype) {
  if (dtype == ScalarType::Half) return kScaledFloat16;
  if (dtype == ScalarType::Float8_e4m3fn) return kScaledE4m3;
  return dtype == ScalarType::Float ? kScaledFloat32 : kScaledBFloat16;
}

int64_t out_stride(const ScaledCall& call) {
  return call.out_stride == 0 ? call.n : call.out_stride;
}

void encode_out(Sm90ScaledParams& params, const ScaledCall& call, const ScaledRow& row,
                const Device& device) {
  const int64_t bytes = element_size(call.out_dtype);
  if (bytes == 1 || call.n * bytes % kMapBytes != 0 || out_stride(call) * bytes % kMapBytes != 0 ||
      reinterpret_cast<uintptr_t>(call.out) % kMapBytes != 0) {
    params.flags |= kScaledOutUnaligned;
    return;
  }
  constexpr MapType kTypes[] = {MapType::kBFloat16, MapType::kFloat16, MapType::kFloat32};
  const int64_t panel = scaled_panel(static_cast<int>(row.tile[1]),
                                     static_cast<int>(kPanelBytes / bytes), row.sums != kFast);
  const MapSwizzle swizzle = panel * bytes == 128  ? MapSwizzle::k128Bytes
                             : panel * bytes == 64 ? MapSwizzle::k64Bytes
                                                   : MapSwizzle::k32Bytes;
  const int64_t rows = call.m * (call.groups.of_k ? call.groups.groups : 1);
  encode_tiled_map(&params.out_map, call.out, kTypes[type_of(call.out_dtype)], swizzle,
                   {dim(call.n, 0, panel), dim(rows, out_stride(call) * bytes, kStoreRows)},
                   device.index);
}

}  // namespace

bool is_gated_quicker(const Device& device, const ScaledCall& call, bool of_two) {
  if (call.n % kTileK != 0) return false;
  const ScaledTable& table = scaled_table(device);
  const ScaledPlan gated = plan_scaled(table, device, call);
  if (gated.row == nullptr) return false;
  ScaledCall steps = call;
  steps.gated = false;
  if (!of_two) steps.n *= 2;
  const double product = plan_scaled(table, device, steps).cost;
  const auto quantized = static_cast<double>(call.m * call.n) *
                         static_cast<double>(2 * element_size(call.out_dtype) + 1);
  return gated.cost <=
         (of_two ? 2 * product + kLaunchCost : product) + quantized / kMemoryBytes + kLaunchCost;
}

void run_sm90_scaled(const Device& device, const ScaledCall& call) {
  const ScaledPlan plan = plan_or_fail(scaled_table(device), device, call);
  const ScaledRow& row = *plan.row;
  Sm90ScaledParams params{};
  // Rows that do not exist are no part of the box: copies of boxes with many of them are slow.
  const int64_t box_m = std::min(row.tile[0], call.m);
  params.stage_bytes = static_cast<int>((box_m + row.tile[1]) * kTileK);
  encode_tiled_map(&params.a, call.a, MapType::kUInt8, MapSwizzle::k128Bytes,
                   {dim(call.k, 0, kTileK), dim(call.m, call.a_stride, box_m)}, device.index);
  std::optional<Workspace> group_rows;
  const auto encode_b = [&](Sm90ScaledMap& map, const char* b, int64_t stride) {
    const MapDim k = dim(call.k, 0, kTileK), rows = dim(call.n, stride, out_columns(row));
    if (row.grouped == kGroupsOfRows) {
      const MapDim groups = dim(call.groups.groups, call.b_group_stride, 1), one = dim(1, 0, 1);
      encode_tiled_map(&map, b, MapType::kUInt8, MapSwizzle::k128Bytes, {k, rows, groups, one, one},
                       device.index);
    } else {
      encode_tiled_map(&map, b, MapType::kUInt8, MapSwizzle::k128Bytes, {k, rows}, device.index);
    }
  };
  encode_b(params.b, call.b, call.b_stride);
  if (row.gated) {
    encode_b(params.out_map, call.b_up, call.b_up_stride);
    params.bias = call.b_up_scales;
  }
  if (row.grouped != kOneProduct) {
    params.rows = call.groups.table;
    if (params.rows == nullptr) {
      group_rows = find_group_rows(device, call.groups, row.tile[0]);
      params.rows = reinterpret_cast<const GroupRow*>(group_rows->data());
    }
    params.b_group_stride = call.b_scales_group_stride;
  }
  if (!row.gated) encode_out(params, call, row, device);
  params.scale_a = call.a_scales.data;
  params.scale_b = call.b_scales.data;
  params.a_stride = call.a_scales.stride;
  params.b_stride = call.b_scales.stride;
  params.a_stride_k = call.a_scales.stride_k;
  params.b_stride_k = call.b_scales.stride_k;
  params.a_shift = call.a_scales.of_128_rows ? 7 : 0;
  params.b_shift = call.b_scales.of_128_rows ? 7 : 0;
  if (!row.gated) params.bias = call.bias;
  params.bias_type = type_of(call.bias_dtype);
  params.bias_stride = call.bias_stride;
  params.out = call.out;
  params.out_type = type_of(call.out_dtype);
  params.out_stride = out_stride(call);
  params.m = static_cast<int>(call.m);
  params.n = static_cast<int>(call.n);
  params.k_blocks = static_cast<int>(ceil_div(call.k, kTileK));
  params.tiles_m = static_cast<int>(plan.tiles_m);
  params.tiles_n = static_cast<int>(plan.tiles_n);
  params.group = static_cast<int>(kGroup);
  params.gate_scales = call.gate_scales;
  if (call.gate_power_of_two) params.flags |= kScaledPowerOfTwo;
  params.gate_stride = call.gate_stride;
  params.gate_stride_k = call.gate_stride_k;
  if (call.blocks) params.flags |= kScaledBlocks;
  if (has_whole_lines(call)) params.flags |= kScaledWholeLines;
  const int64_t blocks = std::min(tiles_of(plan, call), int64_t{device.multiprocessors});
  launch(*row.kernel, {blocks}, device, params);
}

}  // namespace torch_cubin
