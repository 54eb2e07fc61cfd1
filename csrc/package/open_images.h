// The images that a C++ program gives to a module: of memory, of a file, of a package.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/module.h"

namespace torch_cubin {

constexpr uint64_t kUnknownSize = UINT64_MAX;

// As images_of (user_images.h), and takes bundles of torch_cubin.embed, bytes whose size only their
// header says, and cubins with zeros behind their end.
std::vector<SourceImage> images_in_memory(const void* data, uint64_t size,
                                          const std::string& origin, bool jit);

// Of a file, or of a package: a folder with manifest.json, whose images are compared with their
// sha256. Throws [file], [hash], [image].
std::vector<SourceImage> images_at_path(const std::string& path, bool jit);

}  // namespace torch_cubin
