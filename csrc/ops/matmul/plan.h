// Choosing a kernel for a product: all backends are asked alike, and the quickest answer is kept.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "ops/matmul/backend.h"

namespace torch_cubin {

// Deterministic: depends on its arguments and on the tuned tables only. Remembers recent answers by
// thread; the reference is good until this thread's next call. Throws [no_kernel], or the error of
// an entry that was refused, where nobody takes the problem, unless that is for its size
// (too_large).
const MatmulPlan& plan_matmul(const Device& device, const MatmulCase& problem);

// Runs a plan of the problem, and the kernel that stores the mirror image where the plan does not.
void launch_plan(const MatmulPlan& plan, const MatmulProblem& problem,
                 const MatmulOperands& operands, const Device& device);

// What torch_cubin.tune needs: from now on every product that is planned, on any thread, is written
// down, if it is one of the operands' type with at most a bias (tables know no others); what was
// written down before is forgotten. Planning is slow until it is turned off.
void watch_plans(bool on);

// The products that were planned, each once: {"device", "dtype", "product" (tuned.h), "chosen",
// "tuned", "configs": [{"name", "microseconds"}]}, the predicted times.
nlohmann::json watched_plans();

// What a product that is only described would run, without the tuned tables: {"chosen",
// "microseconds", "sum_order"}, and all "configs" on request. `terms`: those that are to be others
// than the device's, which planner_terms() has (cost.h); an empty object: none.
nlohmann::json planned(const Device& device, const MatmulCase& problem, bool with_configs,
                       const nlohmann::json& terms);
nlohmann::json planner_terms(const Device& device);

// The case that JSON describes: as a tuned table's line does (tuned.h), with "dtype" and, where
// they are not as usual, "bias", "activation", "aux", "scaled", "addend", "batch_invariant",
// "float_output", "out_vectors", "a_unit", "b_unit", "a_broadcast", "b_broadcast". Throws [input].
MatmulCase described_case(const nlohmann::json& from);

// While plans are watched, this thread's products that have a config of that name take it, with any
// epilogue; "": none. Products of 8-bit floats take the kernel of that name (ops/scaled). Throws
// [input] where plans are not watched, for the name would be ignored.
void force_config(const std::string& name);

// The thread's forced config; "" if plans are not watched.
const std::string& forced_config();

// Of a plan whose product another plan runs: throws [input] if the forced config is
// "that plan's name/CONFIG", and the product does not run CONFIG.
void check_forced_inner(const std::string& outer, const MatmulPlan& inner);

}  // namespace torch_cubin
