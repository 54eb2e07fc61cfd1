// The images of a package for a module, after its signature and hashes are verified.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "package/package_files.h"
#include "runtime/module.h"

namespace torch_cubin {

// All images of the manifest. `path` names the package in errors. Throws [file], [hash], [image].
std::vector<SourceImage> images_of_package(std::unique_ptr<PackageFiles> files,
                                           const std::string& path, bool jit);

}  // namespace torch_cubin
