// The catalog: the package of built-in kernels that ships with the library.
#pragma once

#include <string>

#include "package/package.h"

namespace torch_cubin {

// Reads it on first use, from the folder `cubins` beside the library, or from the folder that the
// environment variable TORCH_CUBIN_CATALOG names then. Throws [file] for a missing or malformed
// manifest; the next call tries again.
Package& catalog();

// The manifest, with "path", "archs" and "loaded" [{"name", "arch"}].
nlohmann::json catalog_json();

}  // namespace torch_cubin
