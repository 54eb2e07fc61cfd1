// Checks of a contract's constants. Launches that can never succeed are refused when the op is
// defined, not at each of its calls.
#pragma once

#include <string>
#include <vector>

#include "declared/expression.h"
#include "runtime/module.h"

namespace torch_cubin {

// Three expressions each; `cluster` may be empty.
struct LaunchShape {
  const std::vector<Expression>& grid;
  const std::vector<Expression>& block;
  const std::vector<Expression>& cluster;
  const Expression& shared_memory;  // bytes
};

// Throws, for constants only: [input] for values that no GPU accepts, [params] for values that the
// kernel's images exclude. `label` names the entry of the contract: "op 'mylib::f': kernels[0]".
void check_constants(const std::string& label, const LaunchShape& shape, const Module& module,
                     const std::string& kernel);

}  // namespace torch_cubin
