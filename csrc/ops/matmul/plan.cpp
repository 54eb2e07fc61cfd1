#include "ops/matmul/plan.h"

#include <cmath>
#include <cstring>

#include "ops/common/device_tables.h"

namespace torch_cubin {
namespace {

// What every seam has for one device.
struct MatmulTable {
  explicit MatmulTable(const Device& device) : family("matmul", device) {
    for (const KernelSeam* each = KernelSeam::first(); each != nullptr; each = each->next()) {
      if (std::strcmp(each->family(), "matmul") != 0) continue;
      const auto& seam = static_cast<const MatmulSeam&>(*each);
      const std::vector<PackageKernel*>& entries = family.of(seam);
      if (entries.empty()) continue;
      std::unique_ptr<MatmulKernels> on_device = seam.on(device, entries);
      if (on_device != nullptr) kernels.push_back(std::move(on_device));
    }
  }
  FamilyKernels family;
  std::vector<std::unique_ptr<MatmulKernels>> kernels;
};

DeviceTables<MatmulTable> g_matmul_tables;

bool is_better(const MatmulPlan& x, const MatmulPlan& y, bool batch_invariant) {
  if (batch_invariant && x.kernels != nullptr && y.kernels != nullptr &&
      x.sum_order != y.sum_order) {
    return x.sum_order < y.sum_order;
  }
  return x.microseconds < y.microseconds;
}

MatmulPlan quickest(const MatmulTable& table, const MatmulCase& problem) {
  MatmulPlan best;
  bool too_large = false;
  for (const std::unique_ptr<MatmulKernels>& kernels : table.kernels) {
    MatmulPlan plan = kernels->plan(problem);
    too_large = too_large || plan.too_large;
    plan.kernels = std::isfinite(plan.microseconds) ? kernels.get() : nullptr;
    if (plan.kernels != nullptr && is_better(plan, best, problem.batch_invariant)) best = plan;
  }
  best.too_large = too_large && best.kernels == nullptr;
  return best;
}

// Choosing costs microseconds, a launch does too: the last answers are kept by thread.
struct RememberedPlan {
  const MatmulTable* table = nullptr;
  MatmulCase problem;
  MatmulPlan plan;
};
constexpr size_t kRememberedPlans = 256;

size_t slot_of(const MatmulCase& problem) {
  uint64_t hash = problem.facts() + 1;
  for (const int64_t value : {problem.m, problem.n, problem.k, problem.batch}) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15ull;
    hash ^= hash >> 29;
  }
  return hash % kRememberedPlans;
}

}  // namespace

const MatmulPlan& plan_matmul(const Device& device, const MatmulCase& problem) {
  static thread_local RememberedPlan remembered[kRememberedPlans];
  const MatmulTable& table = g_matmul_tables.get(
      device, [](const Device& device) { return std::make_unique<MatmulTable>(device).release(); });
  RememberedPlan& slot = remembered[slot_of(problem)];
  if (slot.table != &table || !(slot.problem == problem)) {
    const MatmulPlan plan = quickest(table, problem);  // which may use the slot for another
    if (plan.kernels == nullptr && !plan.too_large) table.family.fail_no_kernel("this product");
    slot.plan = plan;
    slot.problem = problem;
    slot.table = &table;
  }
  return slot.plan;
}

}  // namespace torch_cubin
