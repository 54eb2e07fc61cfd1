#include "ops/matmul/plan.h"

#include <atomic>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "ops/common/device_tables.h"
#include "ops/matmul/mirror.h"
#include "ops/matmul/tuned.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

// What every backend has for one device.
struct MatmulTable {
  explicit MatmulTable(const Device& device)
      : family("matmul", device), device(device), terms(terms_of(device)) {
    family.for_each_backend<MatmulBackend>([&](const MatmulBackend& backend, const auto& entries) {
      kernels.push_back(backend.on(device, entries));
    });
  }
  FamilyKernels family;
  std::vector<std::unique_ptr<MatmulKernels>> kernels;
  const Device& device;
  const Terms terms;

  // What all backends offer for a case.
  MatmulPlan best(const MatmulCase& problem, std::vector<MatmulPlan>* all = nullptr) const {
    const auto planner = [&](const MatmulCase& product) { return plan_matmul(device, product); };
    return best(problem, terms, planner, all);
  }
  MatmulPlan best(const MatmulCase& problem, const Terms& priced,
                  const MatmulConfigs::Planner& planner,
                  std::vector<MatmulPlan>* all = nullptr) const {
    MatmulConfigs configs(priced, problem.batch_invariant, planner, all);
    if (problem.needs_mirror) {
      const int64_t bytes = element_size(problem.output);
      configs.follow_by_mirror(mirror_work(problem.m, problem.batch, bytes, device));
    }
    for (const std::unique_ptr<MatmulKernels>& each : kernels) {
      configs.from(each.get());
      each->configs(problem, configs);
    }
    return configs.best();
  }
};

DeviceTables<MatmulTable> g_matmul_tables;

bool has_capacity(const MatmulPlan& plan) {
  return plan.kernels == nullptr || plan.kernels->has_capacity(plan);
}

MatmulPlan by_name(const MatmulTable& table, const MatmulCase& problem, const std::string& name) {
  std::vector<MatmulPlan> all;
  table.best(problem, &all);
  for (const MatmulPlan& plan : all) {
    if (plan.kernels->name(plan) == name) return has_capacity(plan) ? plan : MatmulPlan();
  }
  return {};
}

bool is_better(const MatmulPlan& x, const MatmulPlan& y, bool batch_invariant) {
  if (y.kernels == nullptr) return true;
  if (batch_invariant && x.sum_order != y.sum_order) return x.sum_order < y.sum_order;
  return x.microseconds < y.microseconds;
}

MatmulPlan predicted(const MatmulTable& table, const MatmulCase& problem) {
  for (;;) {
    const MatmulPlan best = table.best(problem);
    if (has_capacity(best)) return best;
  }
}

// As it was measured, else as the models predict.
MatmulPlan quickest(const MatmulTable& table, const Device& device, const MatmulCase& problem) {
  // Nor are products of a matrix with its own transpose measured.
  const bool measured = !problem.batch_invariant && !problem.symmetric;
  const std::string config = measured ? tuned_config(device, problem) : "";
  if (!config.empty()) {
    const MatmulPlan plan = by_name(table, problem, config);
    if (plan.kernels != nullptr) return plan;
  }
  return predicted(table, problem);
}

// ---- watching, for torch_cubin.tune

std::atomic<bool> g_watched{false};
std::mutex g_watch_mutex;  // guards what follows
// What was planned while plans are watched; the key is the device and the product, as text.
std::map<std::string, json>& watched() {
  static auto* const all = new std::map<std::string, json>;  // leaked on purpose
  return *all;
}

std::string& own_forced_config() {
  static thread_local std::string name;
  return name;
}

json configs_of(const std::vector<MatmulPlan>& all) {
  json configs = json::array();
  for (const MatmulPlan& plan : all) {
    if (!has_capacity(plan)) continue;
    configs.push_back({{"name", plan.kernels->name(plan)}, {"microseconds", plan.microseconds}});
  }
  return configs;
}

std::string name_of(const MatmulPlan& plan) {
  return plan.kernels == nullptr ? "" : plan.kernels->name(plan);
}

json watched_product(const MatmulTable& table, const Device& device, const MatmulCase& problem,
                     const MatmulPlan& chosen) {
  constexpr const char* kDtypes[kMathCount] = {"float16", "bfloat16", "float32", "float32",
                                               "float64"};
  std::vector<MatmulPlan> all;
  table.best(problem, &all);
  return {{"device", device.index},
          {"dtype", kDtypes[problem.math]},
          {"product", tuned_product(problem)},
          {"chosen", name_of(chosen)},
          {"tuned", tuned_config(device, problem)},
          {"configs", configs_of(all)}};
}

MatmulPlan watched_plan(const MatmulTable& table, const Device& device, const MatmulCase& problem) {
  MatmulPlan plan;
  // "split/128x128 4 splits": the backend named before the slash runs the product, and the config
  // behind it the sums of the splits. "pad ab/transpose ab/sm90 128x128": the first of them that
  // runs a product does, so that each runs what the one before has copied.
  const std::string& forced = own_forced_config();
  const size_t slash = std::min(forced.find('/'), forced.size());
  const std::string inner = forced.substr(std::min(slash + 1, forced.size()));
  const bool is_inner = problem.split_sums || problem.row_parts;
  for (std::string left = is_inner ? inner : forced; !left.empty() && plan.kernels == nullptr;) {
    const size_t end = is_inner ? left.size() : std::min(left.find('/'), left.size());
    plan = by_name(table, problem, left.substr(0, end));
    left = left.substr(std::min(end + 1, left.size()));
  }
  if (plan.kernels == nullptr) plan = quickest(table, device, problem);
  // The tables know sums in the operands' type, and at most a bias.
  if (!problem.only_bias() || problem.output != problem.input || problem.symmetric) return plan;
  const std::string key = std::to_string(device.index) + tuned_product(problem).dump();
  const std::string chosen = name_of(plan);
  {
    std::lock_guard<std::mutex> lock(g_watch_mutex);
    const auto seen = watched().find(key);
    if (seen != watched().end()) {
      seen->second["chosen"] = chosen;
      return plan;
    }
  }
  // Without the lock: some configs plan a product of their own.
  json seen = watched_product(table, device, problem, plan);
  std::lock_guard<std::mutex> lock(g_watch_mutex);
  watched()[key] = std::move(seen);
  return plan;
}

// Choosing costs microseconds, a launch does too: the last answers are kept by thread.
struct RememberedPlan {
  const MatmulTable* table = nullptr;
  uint64_t generation = 0;  // of the tuned tables
  MatmulCase problem;
  MatmulPlan plan;
};
constexpr size_t kRememberedPlans = 256;

const MatmulTable& table_of(const Device& device) { return g_matmul_tables.get(device); }

size_t slot_of(const MatmulCase& problem) {
  uint64_t hash = problem.facts() + 1;
  for (const int64_t value : {problem.m, problem.n, problem.k, problem.batch}) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15ull;
    hash ^= hash >> 29;
  }
  return hash % kRememberedPlans;
}

}  // namespace

void MatmulConfigs::offer(MatmulPlan plan, const Work& work, const Work* last) {
  plan.kernels = kernels_;
  plan.microseconds = price(work) + (last == nullptr ? 0 : price(*last));
  keep(plan);
}

void MatmulConfigs::keep(MatmulPlan plan) {
  if (!plan.mirrors) plan.microseconds += mirror_;
  if (is_better(plan, best_, batch_invariant_)) best_ = plan;
  if (all_ != nullptr) all_->push_back(plan);
}

void MatmulConfigs::rewrite(MatmulPlan plan, const MatmulCase& product, const RewriteBytes& bytes,
                            const CopyCost& cost) {
  plan.kernels = kernels_;
  plan.mirrors = product.needs_mirror;
  rewrites_.push_back({plan, product, bytes, cost});
}

void MatmulConfigs::search(const Rewrite& rewrite) {
  const auto [always, of_split, of_part] = rewrite.bytes;
  MatmulPlan plan = rewrite.plan;
  // One that takes longer than all of another plan needs no search.
  plan.microseconds = price(rewrite.cost.work(always));
  if (!batch_invariant_ && all_ == nullptr && !is_better(plan, best_, false)) return;
  const MatmulPlan inner = planner_(rewrite.product);
  too_large_ = too_large_ || inner.too_large;
  if (inner.kernels == nullptr) return;
  const double bytes = always + of_split * inner.splits + of_part * inner.row_parts;
  plan.microseconds = inner.microseconds + price(rewrite.cost.work(bytes));
  plan.sum_order = inner.sum_order;
  keep(plan);
}

// Rewrites come last: what the kernels take without one bounds the search.
MatmulPlan MatmulConfigs::best() {
  for (const Rewrite& each : rewrites_) search(each);
  rewrites_.clear();
  MatmulPlan plan = best_;
  plan.too_large = too_large_ && plan.kernels == nullptr;
  return plan;
}

const MatmulPlan& plan_matmul(const Device& device, const MatmulCase& problem) {
  static thread_local RememberedPlan remembered[kRememberedPlans];
  const MatmulTable& table = table_of(device);
  RememberedPlan& slot = remembered[slot_of(problem)];
  const uint64_t generation = tuned_generation();
  const bool watched = g_watched.load(std::memory_order_relaxed);
  if (watched || slot.table != &table || slot.generation != generation ||
      !(slot.problem == problem)) {
    // Planning may ask for other plans, which may take the same slot: the answer is copied.
    const MatmulPlan plan =
        watched ? watched_plan(table, device, problem) : quickest(table, device, problem);
    // A case with split sums is a part of another case's plan: without a kernel that plan is
    // skipped.
    const bool needed =
        !plan.too_large && !problem.split_sums && !problem.sums_rows() && !problem.aux;
    if (plan.kernels == nullptr && needed) table.family.fail_no_kernel("this product");
    slot.plan = plan;
    slot.problem = problem;
    slot.table = watched ? nullptr : &table;  // a forced config is nothing to remember
    slot.generation = generation;
  }
  return slot.plan;
}

void launch_plan(const MatmulPlan& plan, const MatmulProblem& p, const MatmulOperands& operands,
                 const Device& device) {
  plan.kernels->launch(plan, p, operands);
  if (p.symmetry == Symmetry::kLower && !plan.mirrors) {
    mirror_lower(operands.c, p.m, p.batch(), element_size(p.output), device);
  }
}

json planned(const Device& device, const MatmulCase& problem, bool with_configs,
             const json& terms) {
  const MatmulTable& table = table_of(device);
  const Terms priced = changed_terms(table.terms, terms);
  // Neither tuned tables nor remembered plans are used, for rewritten cases either.
  const MatmulConfigs::Planner planner = [&](const MatmulCase& product) {
    for (;;) {
      const MatmulPlan plan = table.best(product, priced, planner);
      if (has_capacity(plan)) return plan;
    }
  };
  const MatmulPlan plan = planner(problem);
  json out = {{"chosen", name_of(plan)},
              {"microseconds", plan.kernels == nullptr ? 0 : plan.microseconds},
              {"sum_order", plan.sum_order}};
  if (with_configs) {
    std::vector<MatmulPlan> all;
    table.best(problem, priced, planner, &all);
    out["configs"] = configs_of(all);
  }
  return out;
}

json planner_terms(const Device& device) { return numbers_of(table_of(device).terms); }

void watch_plans(bool on) {
  std::lock_guard<std::mutex> lock(g_watch_mutex);
  watched().clear();
  own_forced_config().clear();
  g_watched.store(on, std::memory_order_relaxed);
}

json watched_plans() {
  std::lock_guard<std::mutex> lock(g_watch_mutex);
  json all = json::array();
  for (const auto& [key, seen] : watched()) all.push_back(seen);
  return all;
}

void force_config(const std::string& name) {
  if (!name.empty() && !g_watched.load(std::memory_order_relaxed)) {
    fail({"input", "the forced config '" + printable(name) + "'", "would not be used",
          "plans that are watched", "none", "Call watch_plans(true) first."});
  }
  own_forced_config() = name;
}

const std::string& forced_config() {
  static const std::string none;
  return g_watched.load(std::memory_order_relaxed) ? own_forced_config() : none;
}

void check_forced_inner(const std::string& outer, const MatmulPlan& inner) {
  const std::string& forced = forced_config();
  const size_t slash = forced.find('/');
  if (slash == std::string::npos || forced.substr(0, slash) != outer) return;
  if (forced.substr(slash + 1) == name_of(inner)) return;
  fail({"input", "the forced config '" + printable(forced) + "'", "cannot run this product",
        "behind the slash the name of a config of the product whose sums it takes",
        "a name that this product does not have, which would run '" + name_of(inner) + "'", ""});
}

}  // namespace torch_cubin
