#include "ops/attention/plan/rows.h"

#include "cubin/error.h"

namespace torch_cubin {
namespace {

constexpr const char* kDtypeNames[] = {"float16", "bfloat16", "float32"};
constexpr const char* kVariantNames[] = {"full", "general", "any"};  // any: a kind without variants

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

AttentionRow::AttentionRow(PackageKernel& entry, const Device& device) : kernel(&entry) {
  const KernelFields fields(entry);
  dtype = static_cast<AttentionDtype>(fields.index("math", kDtypeNames));
  variant = fields.index("layout", kVariantNames);
  int64_t tile[3];
  fields.triple("tile", 1, tile);
  rows = tile[0];
  columns = tile[1];
  head_dim = tile[2];
  slots = device.multiprocessors * fields.integer("blocks_per_multiprocessor", 1);
  dynamic_shared = entry.entry().dynamic_shared;
  saturating = static_cast<int64_t>(fields.number("saturating_blocks", 1, 2));
  const KernelFields cost = fields.object("cost");
  cost_tile = cost.number("k_tile", 0);
  cost_fixed = cost.number("fixed", 0);
}

const AttentionRow* narrowest(const AttentionRows& rows, int64_t head_dim) {
  const AttentionRow* best = nullptr;
  for (const AttentionRow& row : rows) {
    if (row.head_dim >= head_dim && (best == nullptr || row.head_dim < best->head_dim)) best = &row;
  }
  return best;
}

bool check_blocks(int64_t blocks, int64_t most, const char* unit) {
  if (blocks > most) {
    fail({"input", "this attention", "is too large for one launch",
          "at most " + std::to_string(most) + " " + unit, std::to_string(blocks),
          "Compute it in parts."});
  }
  return blocks > 0;
}

}  // namespace torch_cubin
