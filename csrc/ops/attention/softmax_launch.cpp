// The softmax family's kernels: which there are for a device, and their launch.
#include <algorithm>
#include <memory>

#include "cubin/error.h"
#include "ops/attention/softmax.h"
#include "package/family_table.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

constexpr int64_t kWarpColumns = 4096;  // up to here a warp is quick enough for a row

// The catalog's softmax kernels for one device: for rows of a warp, and of a block.
struct SoftmaxTable {
  CatalogKernel* kernels[kSoftmaxKinds][2][2] = {};  // [kind][float64][long rows]
};

constexpr const char* kSoftmaxKindNames[] = {"forward", "backward", "dropout"};

const SoftmaxTable* build_softmax_table(const Device& device) {
  Catalog& catalog = Catalog::get();
  auto table = std::make_unique<SoftmaxTable>();
  const std::string arch = catalog.arch_for(device);
  for (CatalogKernel& kernel : catalog.kernels()) {
    const CatalogEntry& entry = kernel.entry();
    if (entry.family != "softmax" || entry.arch != arch) continue;
    check_one_parameter(entry, sizeof(SoftmaxParams));
    const int kind = index_of(entry.kind, kSoftmaxKindNames, "kind", entry);
    table->kernels[kind][entry.math == "float64"][entry.tile[0] == 1] = &kernel;
  }
  for (const auto& kinds : table->kernels) {
    for (const auto& dtypes : kinds) {
      for (const CatalogKernel* kernel : dtypes) {
        if (kernel != nullptr) continue;
        fail({"no_kernel", "the kernel catalog", "lacks kernels of the softmax family",
              "every kind for float32 and float64, for " + arch, "some",
              "Build the library and its kernels from one source tree."});
      }
    }
  }
  return table.release();
}

FamilyTables<SoftmaxTable> g_softmax_tables;

}  // namespace

void run_softmax(SoftmaxKind kind, const TensorView& scores, const SoftmaxParams& params) {
  if (params.rows == 0) return;
  if (!scores.on_cuda()) return softmax_reference(kind, scores.dtype, params);
  const Device& gpu = device(scores.device_index);
  const bool wide = params.seqlen_k > kWarpColumns;
  CatalogKernel& kernel = *g_softmax_tables.get(gpu, build_softmax_table)
                               .kernels[kind][scores.dtype == ScalarType::Double][wide];
  const int64_t tile_rows = kernel.entry().tile[0];
  const int64_t tiles = (params.rows + tile_rows - 1) / tile_rows;
  kernel.launch(std::min(tiles, kMaxGrid[0]), 1, gpu, &params);
}

}  // namespace torch_cubin
