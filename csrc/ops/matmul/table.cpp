#include "ops/matmul/table.h"

#include <memory>

#include "kernels/matmul/matmul_params.h"
#include "package/family_table.h"

namespace torch_cubin {
namespace {

constexpr const char* kMathNames[] = {"float16", "bfloat16", "tf32", "float32", "float64"};
constexpr const char* kLayoutNames[] = {"nn", "nt", "tn", "tt", "any"};
enum MatmulKind { kMatmulMma, kMatmulPersistent, kMatmulSimt, kMatmulDot, kMatmulReduce };
constexpr const char* kMatmulKindNames[] = {"mma", "persistent", "simt", "dot", "reduce"};

// Dot-product kernels read A at any strides; their layout and alignment speak of B.
Access dot_access(const CatalogEntry& entry, int layout) {
  if (layout == kLayoutAny) return kKElements;
  if (layout == kLayoutNT) return kKVectors;
  return entry.alignment == kVectorBytes ? kOwnVectors : kOwnElements;
}

const MatmulTable* build_matmul_table(const Device& device) {
  Catalog& catalog = Catalog::get();
  auto table = std::make_unique<MatmulTable>();
  table->arch = catalog.arch_for(device);
  table->multiprocessors = device.multiprocessors;
  table->bytes_per_cycle = device.bytes_per_cycle;
  for (CatalogKernel& kernel : catalog.kernels()) {
    const CatalogEntry& entry = kernel.entry();
    if (entry.family != "matmul" || entry.arch != table->arch) continue;
    check_one_parameter(entry, sizeof(MatmulParams));
    const int math = index_of(entry.math, kMathNames, "math", entry);
    const int layout = index_of(entry.layout, kLayoutNames, "layout", entry);
    const int kind = index_of(entry.kind, kMatmulKindNames, "kind", entry);
    const MatmulTable::Row row = {
        &kernel,
        entry.tile[0],
        entry.tile[1],
        entry.tile[2],
        int64_t{device.multiprocessors} * entry.blocks_per_multiprocessor,
        entry.cost_k_tile,
        entry.cost_fixed,
        entry.cost_lone,
        kind == kMatmulDot,
        kind == kMatmulPersistent,
    };
    switch (kind) {
      case kMatmulDot:
        table->dots[math][dot_access(entry, layout)].push_back(row);
        break;
      case kMatmulReduce:
        table->reduce[math] = &kernel;
        break;
      default:
        table->tiles[math][layout].push_back(row);
    }
  }
  // A dot product of float32 is bound by memory: TF32 would gain nothing, so it stays exact. The
  // partial sums of both are float32.
  for (int i = 0; i < kAccessCount; ++i) table->dots[kMathTF32][i] = table->dots[kMathFloat32][i];
  table->reduce[kMathTF32] = table->reduce[kMathFloat32];
  return table.release();
}

FamilyTables<MatmulTable> g_matmul_tables;

}  // namespace

const MatmulTable& matmul_table(const Device& device) {
  return g_matmul_tables.get(device, build_matmul_table);
}

}  // namespace torch_cubin
