// The C API behind torch_cubin.tune (torch_cubin/_tuning): the configs of a product, how to force
// one, and the tables of measured configs.
#include <nlohmann/json.hpp>

#include "c_answer.h"
#include "cubin/error.h"
#include "declared/contract.h"
#include "declared/slots.h"
#include "declared/tuning.h"
#include "ops/matmul/plan.h"
#include "ops/matmul/tuned.h"
#include "package/package.h"
#include "runtime/device.h"

using namespace torch_cubin;

// Starts or stops recording matmul plans (ops/matmul/plan.h).
TORCH_CUBIN_API char* torch_cubin_watch_plans(int on) {
  return answer([&] { watch_plans(on != 0); });
}

// {"plans": [...]} since recording began.
TORCH_CUBIN_API char* torch_cubin_watched_plans() {
  return answer([] { return nlohmann::json{{"plans", watched_plans()}}; });
}

// {"plans": [...], "terms"}: the kernels that each of {"products": [...], "terms"} would run
// (planned() of ops/matmul/plan.h), and the device's terms.
TORCH_CUBIN_API char* torch_cubin_planned(int index, const char* text, int with_configs) {
  return answer([&] {
    const nlohmann::json asked = parse_json(given(text, "products"), "products");
    nlohmann::json plans = nlohmann::json::array();
    for (const nlohmann::json& each : asked.at("products")) {
      plans.push_back(
          planned(device(index), described_case(each), with_configs != 0, asked.at("terms")));
    }
    return nlohmann::json{{"plans", plans}, {"terms", planner_terms(device(index))}};
  });
}

// Forces this thread's products to the config of that name, if they have it; null or "" resets.
TORCH_CUBIN_API char* torch_cubin_force_config(const char* name) {
  return answer([&] { force_config(name != nullptr ? name : ""); });
}

// Adds a tuned table, given as JSON, to this process: of products (ops/matmul/tuned.h), of calls of
// declared ops (declared/tuning.h), or of both.
TORCH_CUBIN_API char* torch_cubin_add_tuned_table(const char* text) {
  return answer([&] {
    const nlohmann::json table = parse_json(given(text, "table"), "a tuned table");
    const bool has_ops = table.is_object() && table.contains("ops");
    if (has_ops) add_tuned_calls(table);
    if (!has_ops || table.contains("products")) add_tuned_table(table);
  });
}

// Records this thread's calls of one declared op from now on; null stops.
TORCH_CUBIN_API char* torch_cubin_watch_op(const char* name) {
  return answer([&] { watch_op(name == nullptr ? nullptr : &find_contract(name)); });
}

// {"calls": [...]} of the recorded op (CallWatch in declared/tuning.h).
TORCH_CUBIN_API char* torch_cubin_watched_calls() {
  return answer([] { return nlohmann::json{{"calls", call_watch().calls}}; });
}

// Forces calls of the recorded op to the kernel of that number; -1: the op's own choice.
TORCH_CUBIN_API char* torch_cubin_force_kernel(int number) {
  return answer([&] {
    CallWatch& watch = call_watch();
    const bool none = watch.contract == nullptr || number < -1 ||
                      number >= static_cast<int>(watch.contract->kernels());
    if (none) {
      fail({"input", "a kernel's number", "is none of an op that is watched", "-1, or a kernel's",
            std::to_string(number), ""});
    }
    watch.forced = number;
  });
}

// tuned_file() of declared/tuning.h.
TORCH_CUBIN_API char* torch_cubin_tuned_file(const char* name, int index) {
  return answer(
      [&] { return tuned_file(find_contract(given(name, "name")), device(index).index); });
}
