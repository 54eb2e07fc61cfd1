#include "ops/attention/portable.h"

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
  const KernelFields cost = fields.object("cost");
  cost_tile = cost.number("k_tile", 0);
  cost_fixed = cost.number("fixed", 0);
}

void check_portable(const PackageKernel& kernel, bool has_variants, const char* header,
                    size_t bytes) {
  check_params(kernel.entry(), header, bytes);
  const AttentionRow row(const_cast<PackageKernel&>(kernel), Device());
  if (has_variants && row.variant == kAttentionVariants) {
    KernelFields(kernel).refuse("layout", "full or general");
  }
}

const AttentionRow* narrowest(const AttentionRows& rows, int64_t head_dim) {
  const AttentionRow* best = nullptr;
  for (const AttentionRow& row : rows) {
    if (row.head_dim >= head_dim && (best == nullptr || row.head_dim < best->head_dim)) best = &row;
  }
  return best;
}

bool check_blocks(int64_t blocks) {
  if (blocks > kMaxGrid[0]) {
    fail({"input", "this attention", "is too large for one launch",
          "at most " + std::to_string(kMaxGrid[0]) + " tiles of output", std::to_string(blocks),
          "Compute it in parts."});
  }
  return blocks > 0;
}

}  // namespace torch_cubin
