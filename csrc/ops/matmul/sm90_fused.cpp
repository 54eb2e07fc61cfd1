#include "ops/matmul/sm90_fused.h"

#include <algorithm>

#include "cubin/error.h"
#include "ops/common/cluster_capacity.h"
#include "ops/common/device_tables.h"
#include "ops/common/launch.h"
#include "ops/matmul/sm90_configs.h"
#include "ops/matmul/sm90_skinny.h"
#include "runtime/tensor_map.h"

namespace torch_cubin {
namespace {

constexpr int64_t kFusedBytes = 2;   // of an element
constexpr int64_t kFusedPanel = 64;  // elements of a tensor map's box along K, and of an output's
constexpr int64_t kFusedStoreRows = 16;  // of an output's box
constexpr int64_t kFusedHalves = 2;      // of a tile of B
constexpr int32_t kFusedGroup = 8;       // rows of tiles that follow one another
constexpr int64_t kMostTiles = 1 << 30;  // counted in 32 bits

struct FusedRow {
  explicit FusedRow(PackageKernel& entry) : kernel(&entry) {
    constexpr const char* kDtypes[] = {"float16", "bfloat16"};
    const KernelFields fields(entry);
    math = fields.index("dtype", kDtypes) == 0 ? kMathFloat16 : kMathBFloat16;
    constexpr const char* kLayouts[] = {"nt"};
    fields.index("layout", kLayouts);
    gated = fields.integer("gated", 0, 1) != 0;
    fields.triple("tile", 1, tile);
    if (tile[1] % (kFusedHalves * kFusedPanel) != 0 || tile[2] != kFusedPanel) {
      fields.refuse("tile", "multiples of 128 columns, and 64 of K");
    }
  }

  int64_t outputs() const { return gated ? tile[1] / 2 : tile[1]; }  // columns of a tile

  PackageKernel* kernel;
  Math math;
  bool gated;
  int64_t tile[3];
};

const RowBackend<FusedRow, Sm90FusedParams> g_sm90_fused("matmul/sm90_fused", "fused",
                                                         {"sm90_fused"});

struct FusedTable {
  explicit FusedTable(const Device& device)
      : rows(g_sm90_fused.rows(FamilyKernels("fused", device))) {}
  std::vector<FusedRow> rows;
  ClusterCapacity clusters{2};
};

const FusedTable& fused_table(const Device& device) {
  static DeviceTables<FusedTable> tables;
  return tables.get(device);
}

struct FusedPlan {
  const FusedRow* row = nullptr;
  bool pair = false;
  int64_t tiles_m = 0, tiles_n = 0;  // of a cluster
  double microseconds = std::numeric_limits<double>::infinity();
};

// What all products of the kernels have in common.
struct FusedCall {
  const FusedLayer* weights[kFusedWeights];
  int count = 0;  // of weights
  char* outputs[kFusedWeights];
  int output_count = 0;
  bool gated = false, aux = false;
  Activation activation = kActivationNone;

  const MatmulProblem& problem() const { return weights[0]->problem; }
};

int64_t tiles_n_of(const FusedCall& call, const FusedRow& row) {
  int64_t tiles = 0;
  for (int i = 0; i < (call.gated ? 1 : call.count); ++i) {
    tiles += ceil_div(call.weights[i]->problem.n, row.outputs());
  }
  return tiles;
}

FusedPlan plan_fused(const FusedTable& table, const Device& device, const FusedCall& call) {
  const MatmulProblem& p = call.problem();
  const auto k_blocks = static_cast<double>(ceil_div(p.k, kFusedPanel));
  const Terms terms = terms_of(device);
  FusedPlan best;
  for (const FusedRow& row : table.rows) {
    if (row.math != p.math || row.gated != call.gated) continue;
    for (const bool pair : {false, true}) {
      if (pair && table.clusters.ask(*row.kernel, device) < 2) continue;
      FusedPlan plan;
      plan.row = &row;
      plan.pair = pair;
      plan.tiles_m = ceil_div(p.m, row.tile[0] * (pair ? 2 : 1));
      plan.tiles_n = tiles_n_of(call, row);
      const int64_t tiles = plan.tiles_m * plan.tiles_n;
      const int64_t clusters = device.multiprocessors / (pair ? 2 : 1);
      if (tiles > kMostTiles) continue;
      if (2 * tiles < clusters) continue;  // splitting K is quicker
      const auto turns = static_cast<double>(ceil_div(tiles, clusters));
      const Sm90Tile tile = {row.tile[0], row.tile[1], false, false, 1, pair ? 2 : 1};
      plan.microseconds = microseconds(sm90_work(tile, turns, turns * k_blocks), terms);
      if (plan.microseconds < best.microseconds) best = plan;
    }
  }
  return best;
}

void encode_fused(Sm90FusedMap& map, const char* data, MapType type, int64_t columns, int64_t rows,
                  int64_t stride, int64_t box_rows, const Device& device) {
  const auto dim = [](int64_t size, int64_t bytes, int64_t box) {
    return MapDim{static_cast<uint64_t>(size), static_cast<uint64_t>(bytes),
                  static_cast<uint32_t>(box)};
  };
  encode_tiled_map(&map, data, type, MapSwizzle::k128Bytes,
                   {dim(columns, 0, kFusedPanel), dim(rows, stride * kFusedBytes, box_rows)},
                   device.index);
}

bool is_skinny(const FusedLayer& layer) { return layer.problem.m <= kSkinnyMostTokens; }

bool run_fused(const Device& device, const FusedCall& call) {
  const FusedTable& table = fused_table(device);
  const FusedPlan plan = plan_fused(table, device, call);
  if (plan.row == nullptr) return false;
  const FusedRow& row = *plan.row;
  const MatmulProblem& p = call.problem();
  const MapType type = p.math == kMathFloat16 ? MapType::kFloat16 : MapType::kBFloat16;
  Sm90FusedParams params{};
  encode_fused(params.a, call.weights[0]->operands.a, type, p.k, p.m, p.a_stride_m, row.tile[0],
               device);
  int64_t first = 0;
  for (int i = 0; i < kFusedWeights; ++i) {
    params.first[i] = static_cast<int>(first);
    if (i >= call.count) continue;
    const FusedLayer& own = *call.weights[i];
    const MatmulProblem& q = own.problem;
    encode_fused(params.b[i], own.operands.b, type, q.k, q.n, q.b_stride_n,
                 row.tile[1] / kFusedHalves, device);
    params.bias[i] = own.operands.bias;
    params.n[i] = static_cast<int>(own.problem.n);
    if (!call.gated || i == 0) first += ceil_div(own.problem.n, row.outputs());
  }
  for (int i = 0; i < call.output_count; ++i) {
    const int64_t n = call.weights[std::min(i, call.count - 1)]->problem.n;
    encode_fused(params.out[i], call.outputs[i], type, n, p.m, n, kFusedStoreRows, device);
  }
  params.m = static_cast<int>(p.m);
  params.k_blocks = static_cast<int>(ceil_div(p.k, kFusedPanel));
  params.tiles_m = static_cast<int>(plan.tiles_m);
  params.tiles_n = static_cast<int>(plan.tiles_n);
  params.group = kFusedGroup;
  params.flags = call.activation << kFusedActivation;
  if (call.aux) params.flags |= kFusedAux;
  if (plan.pair) params.flags |= kFusedPair;
  if (!p.batch_invariant) params.flags |= kFusedSerpentine;
  params.curve = kActivationCurves[call.activation];
  const int64_t size = plan.pair ? 2 : 1;
  const int64_t clusters = std::min(plan.tiles_m * plan.tiles_n, device.multiprocessors / size);
  launch(*row.kernel, {clusters * size, 1, 1, size}, device, params);
  return true;
}

}  // namespace

bool takes_fused(const Device& device, const FusedLayer& layer) {
  const MatmulProblem& p = layer.problem;
  if (p.math != kMathFloat16 && p.math != kMathBFloat16) return false;
  constexpr int64_t kMostRows = INT32_MAX / 2;
  if (p.batch_dims > 0 || std::max({p.m, p.n, p.k}) > kMostRows) return false;
  const MatmulCase c = matmul_case(p, layer.operands);
  const bool operands = c.a == kKVectors && c.b == kKVectors && c.a_mappable && c.b_mappable;
  const char* bias = layer.operands.bias;
  const bool biased = bias == nullptr || (layer.operands.bias_stride == 1 &&
                                          reinterpret_cast<uintptr_t>(bias) % 4 == 0);
  return operands && biased && p.n * kFusedBytes % kVectorBytes == 0 &&
         (is_skinny(layer) ? has_skinny_kernels(device)
                           : c.k_parts == 1 && !fused_table(device).rows.empty());
}

bool run_layers(const Device& device, const FusedLayer* layers, int count) {
  if (is_skinny(layers[0])) return run_skinny_layers(device, layers, count);
  FusedCall call;
  call.count = call.output_count = count;
  for (int i = 0; i < count; ++i) {
    call.weights[i] = &layers[i];
    call.outputs[i] = layers[i].operands.c;
  }
  return run_fused(device, call);
}

bool run_activation_aux(const Device& device, const FusedLayer& layer, char* aux) {
  if (is_skinny(layer)) return false;
  FusedCall call;
  call.count = 1;
  call.weights[0] = &layer;
  call.output_count = 2;
  call.outputs[0] = layer.operands.c;
  call.outputs[1] = aux;
  call.aux = true;
  call.activation = layer.problem.activation;
  return run_fused(device, call);
}

bool run_gated(const Device& device, const FusedLayer& gate, const FusedLayer& up, char* gate_out,
               char* up_out) {
  if (is_skinny(gate)) return gate_out == nullptr && run_skinny_gated(device, gate, up);
  FusedCall call;
  call.gated = true;
  call.count = 2;
  call.weights[0] = &gate;
  call.weights[1] = &up;
  call.aux = gate_out != nullptr;
  call.output_count = call.aux ? 3 : 1;
  call.outputs[0] = gate.operands.c;
  call.outputs[1] = gate_out;
  call.outputs[2] = up_out;
  call.activation = gate.problem.activation;
  return run_fused(device, call);
}

}  // namespace torch_cubin
