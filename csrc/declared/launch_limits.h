// What a contract's constants promise of its launches. What can never be launched is refused when
// the op is defined, not at each of its calls.
#pragma once

#include <string>
#include <vector>

#include "declared/expression.h"
#include "runtime/module.h"

namespace torch_cubin {

// Three expressions each; `cluster` may have none.
struct LaunchShape {
  const std::vector<Expression>& grid;
  const std::vector<Expression>& block;
  const std::vector<Expression>& cluster;
  const Expression& shared_memory;  // bytes
};

// Throws, for constants alone: [input] for what no GPU runs, [params] for what the kernel's images
// exclude, each of them. `label` names the entry of the contract: "op 'mylib::f': kernels[0]".
void check_constants(const std::string& label, const LaunchShape& shape, const Module& module,
                     const std::string& kernel);

}  // namespace torch_cubin
