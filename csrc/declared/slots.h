// Slots: the declared ops of this process.
//
// PyTorch's stable ABI takes a kernel as a bare function, which carries no data. So there is a fixed
// pool of functions, made by a template, and each op that is declared takes one: its slot.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "declared/contract.h"

namespace torch_cubin {

constexpr size_t kMaxDeclaredOps = 1024;

// Registers the contracts' ops with PyTorch, all or none. A contract that equals the op's present one
// changes nothing; another one of the same schema takes its place, unless it comes from a package,
// which may not replace an op that is in use: [input]. Throws [input] where an op exists
// with another schema, or where PyTorch refuses it. Gives for each {"name", "schema", "state",
// "contract", "package"}, the state being "defined", "same" or "swapped".
nlohmann::json define_contracts(std::vector<std::unique_ptr<const Contract>> contracts);

// The contract of an op; throws [input] for one that is not declared here.
const Contract& find_contract(const std::string& name);

// {"name", "schema", "contract", "package"} of every declared op; the package's path, or null.
nlohmann::json declared_ops();

}  // namespace torch_cubin
