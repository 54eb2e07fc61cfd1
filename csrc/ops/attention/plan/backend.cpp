#include "ops/attention/plan/backend.h"

#include <iterator>
#include <nlohmann/json.hpp>

#include "cubin/error.h"

namespace torch_cubin {
namespace {

constexpr const char* kDtypeNames[] = {"float16", "bfloat16", "float32", "any"};

// The AttentionFeatures of an entry; none where it has no such field. Throws [file] for unknown
// ones.
unsigned takes_of(const KernelFields& fields) {
  unsigned takes = 0;
  const auto listed = fields.all().find("takes");
  if (listed == fields.all().end()) return takes;
  if (!listed->is_array()) fields.refuse("takes", "a list");
  for (const auto& name : *listed) {
    unsigned bit = 1;
    for (const char* known : kAttentionFeatures) {
      if (name == known) break;
      bit <<= 1;
    }
    if (bit >> std::size(kAttentionFeatures) != 0)
      fields.refuse("takes", "features that this library knows");
    takes |= bit;
  }
  return takes;
}

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
  e4m3 = fields.text("dtype", "") == "float8_e4m3fn";
  of = fields.text("of", "");
  takes = takes_of(fields);
  int64_t tile[3];
  fields.triple("tile", 1, tile);
  rows = tile[0];
  columns = tile[1];
  head_dim = tile[2];
  slots = device.multiprocessors * fields.integer("blocks_per_multiprocessor", 1);
  stages = fields.integer("stages", 1);
  transposes = fields.number("transposes_values", 0, 0) != 0;
  widens = fields.number("widens", 0, 0) != 0;
  rounds = fields.number("rounds", 0, 0) != 0;
  dynamic_shared = entry.entry().dynamic_shared;
  saturating = static_cast<int64_t>(fields.number("saturating_blocks", 1, 2));
  const KernelFields cost = fields.object("cost");
  cost_tile = cost.number("k_tile", 0);
  cost_fixed = cost.number("fixed", 0);
  teams = static_cast<int64_t>(cost.number("teams", 1, 1));
}

const AttentionRow* AttentionTable::first(AttentionDtype dtype, unsigned needs,
                                          int64_t head_dim) const {
  const AttentionRow* best = nullptr;
  for (const AttentionRow& row : rows_) {
    if (!fits(row, dtype, needs) || row.head_dim < head_dim) continue;
    if (best == nullptr || row.head_dim < best->head_dim) best = &row;
  }
  return best;
}

const AttentionStep* AttentionBackend::step_of(const KernelEntry& entry) const {
  const AttentionStep* const* step = steps_;
  while (*step != nullptr && !(*step)->is_of(entry)) ++step;
  return *step;
}

void AttentionBackend::check(PackageKernel& kernel) const {
  const AttentionStep& step = *step_of(kernel.entry());
  check_params(kernel.entry(), step.header, step.bytes);
  const AttentionRow row(kernel, Device());
  if (step.needs_features && row.takes == 0) {
    KernelFields(kernel).refuse("takes", "at least one feature");
  }
  check_row(step, row);
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
