#include "ops/attention/plan/plan.h"

#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "ops/common/batch_invariant.h"
#include "ops/common/device_tables.h"

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
  if (check_row_ != nullptr) check_row_(step, row);
}

bool check_blocks(int64_t blocks, int64_t most, const char* unit) {
  if (blocks > most) {
    fail({"input", "this attention", "is too large for one launch",
          "at most " + std::to_string(most) + " " + unit, std::to_string(blocks),
          "Compute it in parts."});
  }
  return blocks > 0;
}

namespace {

AttentionKernels* make_attention_kernels(const Device& device) {
  const FamilyKernels family("attention", device);
  auto made = std::make_unique<AttentionKernels>();
  family.for_each_backend<AttentionBackend>(
      [&](const AttentionBackend& backend, const auto& kernels) {
        backend.make(device, AttentionEntries(device, kernels), *made);
      });
  return made.release();
}

DeviceTables<AttentionKernels> g_attention_kernels;

template <class Kernels>
AttentionPlan<Kernels> quickest_of(const std::vector<std::unique_ptr<Kernels>>& backends,
                                   const AttentionCase& problem) {
  AttentionPlan<Kernels> best;
  for (const std::unique_ptr<Kernels>& kernels : backends) {
    const AttentionPlan<Kernels> plan = kernels->plan(problem);
    if (!(plan.microseconds < best.microseconds)) continue;
    best = plan;
    best.kernels = kernels.get();
  }
  return best;
}

// Whether a logit is more than its score times a positive number.
bool has_rule(const AttentionSettings& settings, const AttentionViews& options) {
  // A scale that is not positive reverses the order of the scores, which kernels without a rule do
  // not support. They multiply hidden scores, -inf, with scale * log2(e) as a float, where a
  // positive double can become 0 or inf. Below 1e-37 the lowest reference, -FLT_MAX, would be no
  // further from a score than a weight may grow.
  const auto unit = static_cast<float>(settings.scale * kLog2e);
  return has_score_rule(settings, options) || settings.drop_below > 0 || !(unit > 1e-37f) ||
         !std::isnormal(unit);
}

unsigned features_of(const AttentionCall& call) {
  const bool rule = has_rule(call.settings, call.views);
  unsigned needs = (rule ? kScoreRule : 0u) | (call.views.sinks ? kSinks : 0u);
  if (has_large_softcap(call.settings)) needs |= kLargeSoftcap;
  const auto& mask = call.views.attn_mask;
  if (!mask) return needs == 0 ? kPlainCall : needs | kUnmasked;
  if (mask->dtype == ScalarType::Bool) return needs | kBoolMask;
  const bool wide = call.dtype != ScalarType::Float && mask->dtype == ScalarType::Float;
  return needs | (wide ? kFloatMask : rule ? kAddedMask : kAddedAlone);
}

void measure_mask(AttentionCase& c, const TensorView& mask, const AttentionShape& shape) {
  const int64_t size = c.has(kFloatMask) || c.dtype == ScalarType::Float ? 4 : 2;
  c.mask_bytes = size * shape.seqlen_k;
  bool in_vectors = reinterpret_cast<uintptr_t>(mask.find_data()) % 16 == 0;
  for (int64_t i = 0; i < mask.dim; ++i) {
    const bool is_last = i + 1 == mask.dim, one = mask.sizes[i] == 1 || mask.strides[i] == 0;
    if (!is_last && !one) c.mask_bytes *= mask.sizes[i];
    in_vectors &= is_last ? mask.strides[i] == 1 && mask.sizes[i] == shape.seqlen_k
                          : one || mask.strides[i] * size % 16 == 0;
  }
  c.mask_copy = in_vectors ? 0 : c.mask_bytes;
}

}  // namespace

AttentionCase attention_case(const AttentionCall& call) {
  const AttentionShape& shape = call.shape;
  AttentionCase c;
  c.dtype = call.dtype;
  c.needs = features_of(call);
  if (c.has(kAnyAdded)) measure_mask(c, *call.views.attn_mask, shape);
  c.packed = shape.packed;
  c.heads = shape.heads;
  c.kv_heads = shape.kv_heads;
  c.seqlen_q = shape.seqlen_q;
  c.seqlen_k = shape.seqlen_k;
  c.head_dim = padded_columns(shape.head_dim, call.dtype);
  c.head_dim_v = padded_columns(shape.head_dim_v, call.dtype);
  c.batch = 1;
  return c;
}

const AttentionKernels& attention_kernels(const Device& device) {
  return g_attention_kernels.get(device, make_attention_kernels);
}

AttentionCase planned_case(AttentionCase problem) {
  problem.batch_invariant = batch_invariant();
  if (problem.batch_invariant) problem.batch = 1;
  return problem;
}

ForwardPlan plan_forward(const AttentionKernels& kernels, const AttentionCase& problem) {
  return quickest_of(kernels.forward, problem);
}

BackwardPlan plan_backward(const AttentionKernels& kernels, const AttentionCase& problem) {
  return quickest_of(kernels.backward, problem);
}

}  // namespace torch_cubin
