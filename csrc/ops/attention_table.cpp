#include "ops/attention_table.h"

#include <atomic>
#include <memory>
#include <mutex>

#include "cubin/error.h"
#include "kernels/attention_params.h"

namespace torch_cubin {
namespace {

template <size_t N>
int index_of(const std::string& text, const char* const (&names)[N], const char* field,
             const CatalogEntry& entry) {
  for (size_t i = 0; i < N; ++i) {
    if (text == names[i]) return static_cast<int>(i);
  }
  fail({"internal", "catalog kernel '" + entry.name + "'",
        std::string("has a ") + field + " that the attention family does not know", "", text,
        "Build the library and its kernels from one source tree."});
}

constexpr const char* kDtypeNames[] = {"float16", "bfloat16", "float32"};
constexpr const char* kVariantNames[] = {"full", "general", "any"};  // any: what has no variants
enum Kind { kKindMma, kKindDecode, kKindBackward, kKindCombine, kKindDelta, kKindConvert };
constexpr const char* kKindNames[] = {"mma", "decode", "backward", "combine", "delta", "convert"};

bool per_variant(const std::string& kind) {
  return kind == "mma" || kind == "decode" || kind == "backward";
}

void check_params(const CatalogEntry& entry) {
  if (entry.params.size() == 1 && entry.params[0].offset == 0 &&
      entry.params[0].size == sizeof(AttentionParams)) {
    return;
  }
  fail({"params", "catalog kernel '" + entry.name + "'", "is of another build than this library",
        "one parameter of " + std::to_string(sizeof(AttentionParams)) + " bytes",
        std::to_string(entry.params.size()) + " parameters",
        "Build the library and its kernels from one source tree."});
}

const AttentionTable* build(const Device& device) {
  Catalog& catalog = Catalog::get();
  auto table = std::make_unique<AttentionTable>();
  table->arch = catalog.arch_for(device);
  table->multiprocessors = device.multiprocessors;
  for (CatalogKernel& kernel : catalog.kernels()) {
    const CatalogEntry& entry = kernel.entry();
    if (entry.family != "attention" || entry.arch != table->arch) continue;
    check_params(entry);
    const int dtype = index_of(entry.math, kDtypeNames, "math", entry);
    const int variant = index_of(entry.layout, kVariantNames, "layout", entry);
    if (variant == kAttentionVariants && per_variant(entry.kind)) {
      fail({"internal", "catalog kernel '" + entry.name + "'", "is of a kind that has variants",
            "layout full or general", entry.layout,
            "Build the library and its kernels from one source tree."});
    }
    const AttentionTable::Row row = {
        &kernel,
        entry.tile[0],
        entry.tile[1],
        entry.tile[2],
        int64_t{device.multiprocessors} * entry.blocks_per_multiprocessor,
        entry.cost_k_tile,
        entry.cost_fixed,
    };
    switch (index_of(entry.kind, kKindNames, "kind", entry)) {
      case kKindDecode:
        table->decode[dtype][variant].push_back(row);
        break;
      case kKindBackward:
        table->backward[dtype][variant].push_back(row);
        break;
      case kKindCombine:
        table->combine[dtype].push_back(row);
        break;
      case kKindDelta:
        table->delta[dtype].push_back(row);
        break;
      case kKindConvert:
        table->convert[dtype].push_back(row);
        break;
      default:
        table->forward[dtype][variant].push_back(row);
    }
  }
  return table.release();
}

std::atomic<const AttentionTable*> g_tables[kMaxDevices];  // leaked on purpose, as the catalog is
std::mutex g_tables_mutex;                                 // guards the making of entries

}  // namespace

AttentionDtype attention_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half:
      return kAttendFloat16;
    case ScalarType::BFloat16:
      return kAttendBFloat16;
    case ScalarType::Float:
      return kAttendFloat32;
    default:
      return kAttendDtypes;
  }
}

const AttentionTable& attention_table(const Device& device) {
  const AttentionTable* table = g_tables[device.index].load(std::memory_order_acquire);
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
