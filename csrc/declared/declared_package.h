// Packages: folders with a manifest and images, or libraries that hold such, whose ops are registered
// without source or compiler (docs/manifest.md).
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "declared/contract.h"
#include "package/signature.h"

namespace torch_cubin {

// Registers the ops of {"version": 1, "ops": [...]}, whose contracts name `images`; the answer of
// define_contracts().
nlohmann::json define_ops(const std::string& text, ContractImages& images);

// Registers all ops of a package's folder, or of every package in a library, or none. The answer of
// define_contracts(). Throws [file], [hash], [image] and what Contract throws.
nlohmann::json load_package(const std::string& path, const Trust& trust = {});

// Loads the packages that TORCH_CUBIN_PACKAGES names (paths with ':' between). Never throws: the
// first failure is kept (package/load_error.h), the other packages are loaded.
void load_packages_of_environment() noexcept;

}  // namespace torch_cubin
