#include "ops/rows/kernels.h"

#include <algorithm>
#include <iterator>
#include <map>

#include "cubin/error.h"
#include "kernels/rows/column_sums_params.h"
#include "kernels/rows/losses_params.h"
#include "kernels/rows/norm_params.h"
#include "kernels/rows/scale_params.h"
#include "kernels/rows/softmax_params.h"
#include "kernels/rows/sum_params.h"
#include "ops/common/backend.h"
#include "ops/common/cluster_capacity.h"
#include "ops/common/device_tables.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

// Elements of a row that a thread of shifted.cuh has at a time.
constexpr int64_t kThreadShifted = 2 * kRowVector;
// Losses that a thread adds, where a block has threads for all: each waits for memory anew.
constexpr int64_t kThreadLosses = 1;
constexpr int64_t kMostApart = 64;  // blocks of a row that exchange nothing
// A block computes the losses of so many times what its threads hold before others share the row:
// 2048 x 128256 by clusters of 8, 4, 2 and 1 took 181, 150, 138 and 140 us on an H200.
constexpr int64_t kLossesPasses = 8;
// losses_few: blocks at most, as many as an H100 has at a time.
constexpr int64_t kMostFewLosses = 2 * 132;
// Threads of the least block: the smaller blocks are, the less one waits for another, and the less
// the last ones leave idle.
constexpr int64_t kLeastBlock = 128;
constexpr int kClusterArch = 90;
constexpr int64_t kWarp = 32;  // threads
// Columns at least of rows in registers: eight lanes of a warp, or a block, have one.
constexpr int64_t kLeastWarpColumns = 5 * kRowVector, kLeastBlockColumns = 1024;
// Columns of a block that has its row in shared memory: of a whole block, and the least. Shorter
// rows gain nothing by it (H200, RMS norm: 65536 x 128 10.8 -> 11.8 us, 8192 x 1024 11.3 -> 11.4).
constexpr int64_t kStagedColumns = int64_t{kStagedThreads} * kStagedVectors * kRowVector;
constexpr int64_t kLeastStagedColumns = 2048;
// The same of a cluster (gradient of softmax, H200: 128 x 32000 7.8 -> 9.5 us, 2048 x 128256 390 ->
// 364).
constexpr int64_t kLeastSharedColumns = 65536;
// Kernels read half of a thread's vectors without a test (StagedRow::for_each): a block has them if
// it has at least half of what a warp holds, and a cluster's last block, which has up to seven
// vectors fewer than the others, if those have what two warps hold.
constexpr int64_t kWarpColumns = kWarp * kStagedVectors * kRowVector;
static_assert(kLeastStagedColumns >= kWarpColumns / 2);
static_assert(kLeastSharedColumns >= kMostCluster * 2 * kWarpColumns);
// Bytes of the largest block of such kernels: two tensors of 16 bits.
constexpr int64_t kMostStagedShared = 2 * kStagedColumns * 2;
// The number of norm_backward_sums' blocks fixes the order of the sums, so that it depends on no
// device: as many as fill an H100, in one turn (H200: 2048 x 32768 by 33 or 32 clusters of four 224
// us, by 30 130; 1024 x 65536 by 16 of eight 243, by 15 140).
constexpr int64_t kMultiprocessors = 132;
// Of their passes over rows, fewer of which would take less time than another part's sums.
constexpr int64_t kLeastPasses = 2;
// norm_backward_few: rows and their elements at most, and blocks that have columns at least, but
// for those of fewer rows than they read at a time.
constexpr int64_t kMostFewRows = 4096, kMostFewElements = int64_t{1} << 22;
constexpr int64_t kFewColumnBlocks = 128, kLeastFewRows = 32;
constexpr int64_t kReservedShared = 1024;  // bytes of such a block, the system's, and for sums
constexpr int64_t kMostColumns = INT32_MAX - (int64_t{1} << 20);  // a chunk more is counted

struct Kind {
  RowsKind kind;
  const char* name;    // in the manifest
  const char* header;  // of its parameter
  size_t bytes;
};

constexpr Kind kKinds[] = {
    {kNorm, "norm", "rows/norm", sizeof(NormParams)},
    {kNormStaged, "norm_staged", "rows/norm", sizeof(NormParams)},
    {kNormWarp, "norm_warp", "rows/norm", sizeof(NormParams)},
    {kNormBlock, "norm_block", "rows/norm", sizeof(NormParams)},
    {kNormBackward, "norm_backward", "rows/norm", sizeof(NormParams)},
    {kNormBackwardSums, "norm_backward_sums", "rows/norm", sizeof(NormParams)},
    {kNormBackwardFew, "norm_backward_few", "rows/norm", sizeof(NormParams)},
    {kNormColumns, "norm_columns", "rows/norm", sizeof(NormParams)},
    {kNormParts, "norm_parts", "rows/norm", sizeof(NormParams)},
    {kRowsSoftmax, "softmax", "rows/softmax", sizeof(RowsSoftmaxParams)},
    {kRowsSoftmaxStaged, "softmax_staged", "rows/softmax", sizeof(RowsSoftmaxParams)},
    {kRowsSoftmaxCluster, "softmax_cluster", "rows/softmax", sizeof(RowsSoftmaxParams)},
    {kRowsSoftmaxWarp, "softmax_warp", "rows/softmax", sizeof(RowsSoftmaxParams)},
    {kRowsSoftmaxBackward, "softmax_backward", "rows/softmax", sizeof(RowsSoftmaxParams)},
    {kRowsSoftmaxBackwardStaged, "softmax_backward_staged", "rows/softmax",
     sizeof(RowsSoftmaxParams)},
    {kRowsSoftmaxBackwardBlock, "softmax_backward_block", "rows/softmax",
     sizeof(RowsSoftmaxParams)},
    {kRowsSoftmaxBackwardWarp, "softmax_backward_warp", "rows/softmax", sizeof(RowsSoftmaxParams)},
    {kRowsSum, "sum", "rows/sum", sizeof(RowSumParams)},
    {kColumnSums, "column_sums", "rows/column_sums", sizeof(ColumnSumsParams)},
    {kLosses, "losses", "rows/losses", sizeof(LossesParams)},
    {kLossesFew, "losses_few", "rows/losses", sizeof(LossesParams)},
    {kLossesGeneral, "losses_general", "rows/losses", sizeof(LossesParams)},
    {kLossesBackward, "losses_backward", "rows/losses", sizeof(LossesParams)},
    {kLossesSum, "losses_sum", "rows/losses", sizeof(LossesParams)},
    {kScale, "scale", "rows/scale", sizeof(ScaleParams)},
};

constexpr bool has_every_kind_in_order() {
  for (size_t i = 0; i < std::size(kKinds); ++i) {
    if (kKinds[i].kind != static_cast<RowsKind>(i)) return false;
  }
  return std::size(kKinds) == kRowsKinds;
}
static_assert(has_every_kind_in_order());

// In the order of RowDtype.
constexpr ScalarType kDtypes[] = {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float};
constexpr const char* kDtypeNames[] = {"float16", "bfloat16", "float32"};

// Whether warps of a kind's kernels have whole rows in registers.
constexpr bool is_of_warps(RowsKind kind) {
  return kind == kNormWarp || kind == kRowsSoftmaxWarp || kind == kRowsSoftmaxBackwardWarp;
}

// Whether threads of a warp, of a block, or of a cluster's blocks have whole rows in registers.
bool holds_rows(RowsKind kind) {
  return is_of_warps(kind) || kind == kNormBlock || kind == kRowsSoftmaxBackwardBlock ||
         kind == kRowsSoftmaxCluster;
}

// A kernel of such a kind, with its fields.
struct HoldingKernel {
  explicit HoldingKernel(PackageKernel& kernel) : kernel(&kernel) {
    const KernelFields fields(kernel);
    int64_t tile[3];
    fields.triple("tile", 1, tile);
    rows = tile[0];
    width = tile[1];
  }
  PackageKernel* kernel;
  int64_t rows;   // of a thread
  int64_t width;  // columns of a block, at most
};

class RowsBackend : public KernelBackend {
 public:
  RowsBackend() : KernelBackend("rows") {}
  void check(PackageKernel& kernel) const override {
    const KernelFields fields(kernel);
    fields.index("dtype", kDtypeNames);
    const Kind& kind = kKinds[fields.index("kind", kKinds)];
    check_params(kernel.entry(), kind.header, kind.bytes);
    if (holds_rows(kind.kind)) static_cast<void>(HoldingKernel(kernel));
    if (kind.kind != kNormBackwardSums) return;
    int64_t tile[3];
    fields.triple("tile", 1, tile);
    fields.integer("stages", 1);
    fields.integer("blocks", 1);
    fields.integer("most_cluster", 1);
    fields.integer("of_warps", 0, 1);
  }
};

const RowsBackend g_rows;

// A kernel of kind norm_backward_sums, with its fields.
struct SumsKernel {
  explicit SumsKernel(PackageKernel& kernel) : kernel(&kernel), block(kernel.entry().block[0]) {
    const KernelFields fields(kernel);
    int64_t tile[3];
    fields.triple("tile", 1, tile);
    width = tile[1];
    stages = fields.integer("stages", 1);
    blocks = fields.integer("blocks", 1);
    most_cluster = fields.integer("most_cluster", 1);
    of_warps = fields.integer("of_warps", 0, 1) != 0;
  }
  PackageKernel* kernel;
  int64_t block;           // threads
  int64_t width;           // columns of a block, of several rows if of_warps
  int64_t stages, blocks;  // blocks of a multiprocessor
  int64_t most_cluster;    // blocks of a row, at most
  bool of_warps;           // for rows that fill the vectors of a warp, but for the last of a thread
};

struct RowsTable {
  explicit RowsTable(const Device& device) : family("rows", device) {
    family.for_each_backend<KernelBackend>([&](const KernelBackend&, const auto& own) {
      for (PackageKernel* kernel : own) {
        const KernelFields fields(*kernel);
        const size_t kind = fields.index("kind", kKinds),
                     dtype = fields.index("dtype", kDtypeNames);
        kernels[kind][dtype].push_back(kernel);
        if (holds_rows(static_cast<RowsKind>(kind))) holding[kind][dtype].emplace_back(*kernel);
        clusters.try_emplace(kernel, kMostCluster);
      }
    });
    for (auto& of_kind : kernels) {
      for (auto& of_dtype : of_kind) {
        std::sort(of_dtype.begin(), of_dtype.end(), [](PackageKernel* a, PackageKernel* b) {
          const int64_t left = a->entry().block[0], right = b->entry().block[0];
          return left != right ? left < right : a->entry().name < b->entry().name;
        });
      }
    }
    for (auto& of_kind : holding) {
      for (auto& of_dtype : of_kind) {
        std::sort(of_dtype.begin(), of_dtype.end(),
                  [](const HoldingKernel& a, const HoldingKernel& b) { return a.width < b.width; });
      }
    }
    for (size_t i = 0; i < std::size(kDtypes); ++i) {
      for (PackageKernel* each : kernels[kNormBackwardSums][i]) sums[i].emplace_back(*each);
      std::sort(sums[i].begin(), sums[i].end(), [](const SumsKernel& a, const SumsKernel& b) {
        if (a.of_warps != b.of_warps) return a.of_warps;
        return a.width * a.most_cluster < b.width * b.most_cluster;
      });
    }
  }

  // `dynamic_shared`: the most that the kernel is ever launched with.
  int64_t largest_cluster(PackageKernel& kernel, const Device& device,
                          int64_t dynamic_shared = 0) const {
    return clusters.at(&kernel).ask(kernel, device, dynamic_shared);
  }

  FamilyKernels family;
  // Those of few threads first, and those for clusters, whose names are longer, last.
  std::vector<PackageKernel*> kernels[kRowsKinds][std::size(kDtypes)];
  // Those of short rows first, but of_warps before others; read once, as their manifest is slow to
  // search.
  std::vector<HoldingKernel> holding[kRowsKinds][std::size(kDtypes)];
  std::vector<SumsKernel> sums[std::size(kDtypes)];
  // Of each kernel, because they use more and less of a multiprocessor.
  std::map<const PackageKernel*, ClusterCapacity> clusters;
};

DeviceTables<RowsTable> g_rows_tables;

const RowsTable& table_of(const Device& device) { return g_rows_tables.get(device); }

int64_t dtype_index(ScalarType dtype) {
  return std::find(kDtypes, std::end(kDtypes), dtype) - kDtypes;
}

const std::vector<PackageKernel*>& kernels_of(RowsKind kind, ScalarType dtype,
                                              const RowsTable& table) {
  const int64_t own = dtype_index(dtype);
  const std::vector<PackageKernel*>& found = table.kernels[kind][own];
  if (found.empty()) {
    table.family.fail_no_kernel(std::string("rows, kind ") + kKinds[kind].name + ", " +
                                kDtypeNames[own]);
  }
  return found;
}

// The least power of two, at most `most`, of which each has `each` of `columns`.
int64_t shares(int64_t columns, int64_t each, int64_t most) {
  int64_t count = 1;
  while (count < most && count * each < columns) count *= 2;
  return count;
}

}  // namespace

bool has_staged_rows(RowsKind kind, const RowSizes& sizes, ScalarType row_dtype,
                     const Device& device) {
  if (!has_vectors(sizes) || sizes.columns < kLeastStagedColumns) return false;
  const RowsTable& table = table_of(device);
  const std::vector<PackageKernel*>& found = table.kernels[kind][dtype_index(row_dtype)];
  if (found.empty()) return false;
  if (sizes.columns <= kStagedColumns) return true;
  return kind == kRowsSoftmaxBackwardStaged && sizes.columns >= kLeastSharedColumns &&
         sizes.columns <= kMostCluster * kStagedColumns &&
         table.largest_cluster(*found.back(), device, kMostStagedShared) == kMostCluster;
}

bool has_held_rows(RowsKind kind, const RowSizes& sizes, ScalarType row_dtype,
                   const Device& device) {
  const RowsTable& table = table_of(device);
  const std::vector<HoldingKernel>& found = table.holding[kind][dtype_index(row_dtype)];
  if (!has_vectors(sizes) || found.empty()) return false;
  const int64_t most = found.back().width;
  if (kind == kRowsSoftmaxCluster) {
    // Of more than one block: then each has more than half of what it holds (softmax_cluster.cu).
    return sizes.columns > most && sizes.columns <= kMostCluster * most &&
           table.largest_cluster(*found.back().kernel, device) == kMostCluster;
  }
  const int64_t least = is_of_warps(kind) ? kLeastWarpColumns : kLeastBlockColumns;
  return sizes.columns >= least && sizes.columns <= most;
}

bool has_few_losses(const RowSizes& sizes, ScalarType row_dtype, const Device& device) {
  if (!has_vectors(sizes) || sizes.rows > kMostFewLosses) return false;
  if (table_of(device).kernels[kLossesFew][dtype_index(row_dtype)].empty()) return false;
  const RowsLayout few(kLossesFew, device, sizes, row_dtype);
  if (sizes.rows * few.cluster > kMostFewLosses) return false;
  // Rows that a block reads at once wait for memory no more often by losses. Where only smaller
  // clusters of one of the two fit, the bits would differ.
  return sizes.columns > few.threads * kThreadBytes / element_size(row_dtype) &&
         few.cluster == RowsLayout(kLosses, device, sizes, row_dtype).cluster;
}

PackageKernel& rows_kernel(RowsKind kind, ScalarType row_dtype, const Device& device) {
  return *kernels_of(kind, row_dtype, table_of(device)).front();
}

int64_t largest_cluster(RowsKind kind, ScalarType row_dtype, const Device& device) {
  if (device.sm < kClusterArch) return 1;
  return table_of(device).largest_cluster(rows_kernel(kind, row_dtype, device), device);
}

RowsLayout::RowsLayout(RowsKind kind, const Device& device, const RowSizes& sizes,
                       ScalarType row_dtype, int64_t tensors) {
  const bool of_losses = kind == kLosses || kind == kLossesFew || kind == kLossesGeneral;
  const int64_t of_thread = kind == kLossesSum   ? kThreadLosses
                            : has_vectors(sizes) ? kThreadBytes / element_size(row_dtype)
                            : of_losses          ? kThreadShifted
                                                 : kThreadSingles;
  const RowsTable& table = table_of(device);
  const std::vector<PackageKernel*>& of_kind = kernels_of(kind, row_dtype, table);
  joins = kind != kLossesBackward;
  if (kind == kNormStaged || kind == kRowsSoftmaxStaged || kind == kRowsSoftmaxBackwardStaged) {
    if (sizes.columns > kStagedColumns) cluster = kMostCluster;
    kernel = cluster > 1 ? of_kind.back() : of_kind.front();
    const int64_t of_block = ceil_div(sizes.columns, kRowVector * cluster);  // vectors
    threads = own_block = ceil_div(of_block, kStagedVectors * kWarp) * kWarp;
    at_once = 1;
    tiles = sizes.rows;
    dynamic_shared = tensors * of_block * kRowVector * element_size(row_dtype);
    return;
  }
  if (holds_rows(kind)) {
    const std::vector<HoldingKernel>& of_dtype = table.holding[kind][dtype_index(row_dtype)];
    auto own = std::find_if(of_dtype.begin(), of_dtype.end(),
                            [&](const HoldingKernel& each) { return sizes.columns <= each.width; });
    if (own == of_dtype.end()) {
      --own;
      cluster = shares(sizes.columns, own->width, kMostCluster);
    }
    kernel = own->kernel;
    const int64_t block = kernel->entry().block[0];
    if (cluster > 1) {
      threads = own_block = block;
      if (cluster == kMostCluster) {
        // As few warps as hold a block's part, of which more fit on a multiprocessor: few vectors
        // of many threads leave it idle (4096 x 65544, H200: 312 -> 268 us), but of shorter rows
        // few are slower so (256 x 16392 5.9 -> 7.2).
        const int64_t of_block = ceil_div(sizes.columns, kRowVector * cluster);  // vectors
        threads = own_block = ceil_div(of_block, own->width / block / kRowVector * kWarp) * kWarp;
      }
    } else if (is_of_warps(kind)) {
      threads = shares(sizes.columns, kRowVector, kWarp);
      own_block = block;
    } else {
      threads = own_block = ceil_div(sizes.columns, own->width / block * kWarp) * kWarp;
    }
    at_once = own_block / threads * own->rows;
    tiles = ceil_div(sizes.rows, at_once);
    return;
  }
  for (PackageKernel* each : of_kind) {
    kernel = each;
    // The widest blocks are for rows that no cluster of others holds.
    const int64_t width = each->entry().block[0] * of_thread;
    if (sizes.columns <= (each == of_kind[0] ? width : width * kMostCluster)) break;
  }
  const int64_t block = kernel->entry().block[0];
  threads = shares(sizes.columns, of_thread, block);
  if (!joins) {
    cluster = shares(sizes.columns, threads * of_thread, kMostApart);
  } else if (threads == block && device.sm >= kClusterArch) {
    const int64_t passes = of_losses ? kLossesPasses : 1;
    cluster = shares(sizes.columns, block * of_thread * passes, kMostCluster);
    if (cluster > 1) cluster = std::min(cluster, table.largest_cluster(*kernel, device));
  }
  own_block = std::min(block, std::max(threads, kLeastBlock));
  at_once = own_block / threads;
  tiles = ceil_div(sizes.rows, at_once);
}

Grid RowsLayout::grid() const {
  Grid grid;
  grid.x = tiles * cluster;
  grid.block_x = own_block;
  grid.dynamic_shared = dynamic_shared;
  if (joins) grid.cluster_x = cluster;
  return grid;
}

SumsLayout::SumsLayout(const Device& device, const RowSizes& sizes, ScalarType row_dtype,
                       bool with_grad_sum, bool with_bias_sums) {
  if (!has_vectors(sizes)) return;
  const RowsTable& table = table_of(device);
  kernels_of(kNormBackwardSums, row_dtype, table);  // throws if there is none
  const std::vector<SumsKernel>& of_dtype = table.sums[dtype_index(row_dtype)];
  const int64_t most_shared = device.shared_optin - kReservedShared;
  for (const SumsKernel& each : of_dtype) {
    if (each.of_warps) {
      const int64_t vector = kWarp * kRowVector, of_warp = each.width / each.block * kWarp;
      if (sizes.columns <= of_warp - vector || sizes.columns > of_warp) continue;
      threads = kWarp;
    } else if (with_bias_sums && element_size(row_dtype) == 2 && device.sm >= kClusterArch &&
               each.blocks > 1 && sizes.columns == each.width) {
      // Two rows fill a block of the next kernel, which leaves half as many sums (layer norm, H200:
      // 2048 x 4096 18.7 -> 17.9 us, 8192 rows 52.1 -> 51.9; without sums for a bias no gain).
      continue;
    } else {
      threads = shares(sizes.columns, each.width / each.block, each.block);
    }
    cluster = shares(sizes.columns, each.width, each.most_cluster);
    if (cluster > 1) {
      cluster = std::min(cluster, table.largest_cluster(*each.kernel, device, most_shared));
    }
    if (sizes.columns > each.width * cluster) continue;
    vectors = ceil_div(sizes.columns, threads * cluster * kRowVector);
    grid.block_x = each.block;
    if (threads == each.block) {
      // As few warps as hold the row: it fills their vectors, or leaves few of them empty.
      threads = ceil_div(sizes.columns, vectors * cluster * kRowVector * kWarp) * kWarp;
      grid.block_x = threads;
    }
    grid.dynamic_shared = each.stages * (with_grad_sum ? 3 : 2) * vectors * each.block *
                          kRowVector * element_size(row_dtype);
    if (grid.dynamic_shared > most_shared) continue;
    kernel = each.kernel;
    parts = std::min(ceil_div(sizes.rows, kLeastPasses * (each.block / threads)),
                     each.blocks * clusters_at_once(kMultiprocessors, cluster));
    grid.x = parts * cluster;
    grid.cluster_x = cluster;
    return;
  }
}

bool has_few_rows(const RowSizes& sizes, ScalarType row_dtype, const Device& device) {
  const SumsLayout sums(device, sizes, row_dtype, /*with_grad_sum=*/false,
                        /*with_bias_sums=*/false);
  return FewRowsLayout(device, sizes, row_dtype, sums).kernel != nullptr;
}

FewRowsLayout::FewRowsLayout(const Device& device, const RowSizes& sizes, ScalarType row_dtype,
                             const SumsLayout& sums) {
  const RowsTable& table = table_of(device);
  const std::vector<PackageKernel*>& found =
      table.kernels[kNormBackwardFew][dtype_index(row_dtype)];
  if (found.empty() || sums.kernel == nullptr || sums.cluster > 1 || sizes.rows > kMostFewRows ||
      sizes.rows * sizes.columns > kMostFewElements || sums.threads > found[0]->entry().block[0]) {
    return;
  }
  kernel = found[0];
  const int64_t columns = torch_cubin::blocks_of_columns(sizes);
  cluster = std::min({shares(sizes.rows, kLeastFewRows, kMostCluster),
                      shares(kFewColumnBlocks, columns, kMostCluster),
                      table.largest_cluster(*kernel, device)});
  blocks_of_columns = columns * cluster;
  const int64_t of_rows = ceil_div(sizes.rows, kernel->entry().block[0] / sums.threads);
  grid.x = blocks_of_columns + ceil_div(of_rows, cluster) * cluster;
  grid.cluster_x = cluster;
}

int row_dtype(const char* op, ScalarType dtype) {
  const auto* found = std::find(kDtypes, std::end(kDtypes), dtype);
  if (found != std::end(kDtypes)) return static_cast<int>(found - kDtypes);
  fail({"no_kernel", op, "has no kernel for this dtype on CUDA", "float16, bfloat16 or float32",
        dtype_name(dtype), "Convert the input, or use PyTorch's function."});
}

bool are_too_long(const RowSizes& sizes) { return sizes.columns > kMostColumns; }

void check_length(const char* op, const RowSizes& sizes) {
  if (!are_too_long(sizes)) return;
  fail({"no_kernel", op, "has longer rows than kernels take",
        "at most " + std::to_string(kMostColumns) + " elements", std::to_string(sizes.columns),
        ""});
}

}  // namespace torch_cubin
