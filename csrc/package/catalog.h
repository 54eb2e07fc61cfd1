// The catalog: the package of built-in kernels that ships with the library.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "package/package.h"

namespace torch_cubin {

// Reads the catalog on first use, from the folder in the environment variable TORCH_CUBIN_CATALOG
// or else the folder `cubins` beside the library. Throws [file] for a missing or malformed
// manifest; the next call tries again.
Package& catalog();

// The manifest plus "path", "archs" and "loaded" [{"name", "arch"}].
nlohmann::json catalog_json();

// A kernel's cubin. Throws [no_kernel], and as PackageKernel::cubin() does.
std::vector<uint8_t> catalog_cubin(const std::string& name, const std::string& arch);

}  // namespace torch_cubin
