#include "ops/matmul_table.h"

#include <atomic>
#include <memory>
#include <mutex>

#include "cubin/error.h"
#include "kernels/matmul_params.h"

namespace torch_cubin {
namespace {

template <size_t N>
int index_of(const std::string& text, const char* const (&names)[N], const char* field,
             const CatalogEntry& entry) {
  for (size_t i = 0; i < N; ++i) {
    if (text == names[i]) return static_cast<int>(i);
  }
  fail({"internal", "catalog kernel '" + entry.name + "'",
        std::string("has a ") + field + " that the matmul family does not know", "", text,
        "Build the library and its kernels from one source tree."});
}

constexpr const char* kMathNames[] = {"float16", "bfloat16", "tf32", "float32", "float64"};
constexpr const char* kLayoutNames[] = {"nn", "nt", "tn", "tt", "any"};
enum Kind { kKindMma, kKindPersistent, kKindSimt, kKindDot, kKindReduce };
constexpr const char* kKindNames[] = {"mma", "persistent", "simt", "dot", "reduce"};

// Dot-product kernels read A at any strides; their layout and alignment speak of B.
Access dot_access(const CatalogEntry& entry, int layout) {
  if (layout == kLayoutAny) return kKElements;
  if (layout == kLayoutNT) return kKVectors;
  return entry.alignment == kVectorBytes ? kOwnVectors : kOwnElements;
}

// Kernels take MatmulParams by value; catalog.cpp compares a manifest with its cubins.
void check_params(const CatalogEntry& entry) {
  if (entry.params.size() == 1 && entry.params[0].offset == 0 &&
      entry.params[0].size == sizeof(MatmulParams)) {
    return;
  }
  fail({"params", "catalog kernel '" + entry.name + "'", "is of another build than this library",
        "one parameter of " + std::to_string(sizeof(MatmulParams)) + " bytes",
        std::to_string(entry.params.size()) + " parameters" +
            (entry.params.empty()
                 ? ""
                 : ", the first of " + std::to_string(entry.params[0].size) + " bytes"),
        "Build the library and its kernels from one source tree."});
}

const MatmulTable* build(const Device& device) {
  Catalog& catalog = Catalog::get();
  auto table = std::make_unique<MatmulTable>();
  table->arch = catalog.arch_for(device);
  table->multiprocessors = device.multiprocessors;
  table->bytes_per_cycle = device.bytes_per_cycle;
  for (CatalogKernel& kernel : catalog.kernels()) {
    const CatalogEntry& entry = kernel.entry();
    if (entry.family != "matmul" || entry.arch != table->arch) continue;
    check_params(entry);
    const int math = index_of(entry.math, kMathNames, "math", entry);
    const int layout = index_of(entry.layout, kLayoutNames, "layout", entry);
    const int kind = index_of(entry.kind, kKindNames, "kind", entry);
    const MatmulTable::Row row = {
        &kernel,
        entry.tile[0],
        entry.tile[1],
        entry.tile[2],
        int64_t{device.multiprocessors} * entry.blocks_per_multiprocessor,
        entry.cost_k_tile,
        entry.cost_fixed,
        entry.cost_lone,
        kind == kKindDot,
        kind == kKindPersistent,
    };
    switch (kind) {
      case kKindDot:
        table->dots[math][dot_access(entry, layout)].push_back(row);
        break;
      case kKindReduce:
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

std::atomic<const MatmulTable*> g_tables[kMaxDevices];  // leaked on purpose, as the catalog is
std::mutex g_tables_mutex;                              // guards the making of entries

}  // namespace

const MatmulTable& matmul_table(const Device& device) {
  const MatmulTable* table = g_tables[device.index].load(std::memory_order_acquire);
  if (table != nullptr) return *table;
  std::lock_guard<std::mutex> lock(g_tables_mutex);
  table = g_tables[device.index].load(std::memory_order_relaxed);
  if (table == nullptr) {
    table = build(device);
    g_tables[device.index].store(table, std::memory_order_release);
  }
  return *table;
}

}  // namespace torch_cubin
