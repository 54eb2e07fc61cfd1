// The catalog: the package of built-in kernels that ships with the library.
#pragma once

#include <string>

#include "package/package.h"

namespace torch_cubin {

// Reads the catalog on first use, from the folder in the environment variable TORCH_CUBIN_CATALOG
// or else the folder `cubins` beside the library. Throws [file] for a missing or malformed
// manifest; the next call tries again.
Package& catalog();

// The manifest plus "path", "archs" and "loaded" [{"name", "arch"}].
nlohmann::json catalog_json();

}  // namespace torch_cubin
