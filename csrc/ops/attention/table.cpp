#include "ops/attention/table.h"

#include <memory>

#include "cubin/error.h"
#include "kernels/attention/attention_params.h"

namespace torch_cubin {
namespace {

constexpr const char* kDtypeNames[] = {"float16", "bfloat16", "float32"};
constexpr const char* kVariantNames[] = {"full", "general", "any"};  // any: what has no variants
enum AttentionKind {
  kKindMma,
  kKindDecode,
  kKindBackward,
  kKindGradientK,
  kKindGradientQ,
  kKindCombine,
  kKindDelta,
  kKindConvert
};
constexpr const char* kAttentionKindNames[] = {"mma",        "decode",  "backward", "gradient_k",
                                               "gradient_q", "combine", "delta",    "convert"};

bool per_variant(const std::string& kind) {
  return kind == "mma" || kind == "decode" || kind == "backward";
}

const AttentionTable* build_attention_table(const Device& device) {
  Catalog& catalog = Catalog::get();
  auto table = std::make_unique<AttentionTable>();
  table->arch = catalog.arch_for(device);
  table->multiprocessors = device.multiprocessors;
  for (CatalogKernel& kernel : catalog.kernels()) {
    const CatalogEntry& entry = kernel.entry();
    if (entry.family != "attention" || entry.arch != table->arch) continue;
    check_one_parameter(entry, sizeof(AttentionParams));
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
    switch (index_of(entry.kind, kAttentionKindNames, "kind", entry)) {
      case kKindDecode:
        table->decode[dtype][variant].push_back(row);
        break;
      case kKindBackward:
        table->backward[dtype][variant].push_back(row);
        break;
      case kKindGradientK:
        table->gradient_k[dtype].push_back(row);
        break;
      case kKindGradientQ:
        table->gradient_q[dtype].push_back(row);
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

FamilyTables<AttentionTable> g_attention_tables;

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
  return g_attention_tables.get(device, build_attention_table);
}

}  // namespace torch_cubin
