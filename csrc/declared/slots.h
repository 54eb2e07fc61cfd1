// Slots: the declared ops of this process.
//
// The stable ABI registers plain function pointers, which carry no data. So a template makes a
// fixed pool of functions, and each declared op takes one: its slot.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "declared/contract.h"

namespace torch_cubin {

constexpr size_t kMaxDeclaredOps = 1024;

// Registers the contracts' ops with PyTorch, all or none. A contract equal to the op's current one
// changes nothing; another contract with the same schema replaces it, except from a package, which
// may not replace an op: [input]. Throws [input] if the op exists with another schema, or PyTorch
// refuses it. Returns {"name", "schema", "state", "contract", "package"} for each op, the state
// being "defined", "same" or "swapped".
nlohmann::json define_contracts(std::vector<std::unique_ptr<const Contract>> contracts);

// The contract of an op; throws [input] if it is not declared in this process.
const Contract& find_contract(const std::string& name);

// {"name", "schema", "contract", "package"} of every declared op; the package's path, or null.
nlohmann::json declared_ops();

}  // namespace torch_cubin
