// Packages of ops: folders with a manifest and images, or libraries that contain them. Their ops
// are registered without source or compiler (docs/manifest.md).
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "declared/contract.h"
#include "package/signature.h"

namespace torch_cubin {

// Registers the ops of {"version": 1, "ops": [...]}, whose contracts refer to `images`. Returns the
// result of define_contracts().
nlohmann::json define_ops(const std::string& text, ContractImages& images);

// Registers all ops of a package's folder, or of every package in a library, or none. Returns the
// result of define_contracts(). Throws [file], [hash], [image] and Contract's errors.
nlohmann::json load_package(const std::string& path, const Trust& trust = {});

// Loads the packages in TORCH_CUBIN_PACKAGES (paths separated by ':'). Never throws: the first
// error is stored (package/load_error.h), and the other packages are loaded.
void load_packages_of_environment() noexcept;

}  // namespace torch_cubin
