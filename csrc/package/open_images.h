// The images of a C++ program's module: from memory, a file, or a package.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/module.h"

namespace torch_cubin {

constexpr uint64_t kUnknownSize = UINT64_MAX;

// Like images_of (user_images.h), but also accepts bundles of torch_cubin.embed, bytes whose size
// is known only from their header (kUnknownSize), and cubins followed by zeros.
std::vector<SourceImage> images_in_memory(const void* data, uint64_t size,
                                          const std::string& origin, bool jit);

// The images of a file; of a package: a folder with manifest.json, whose images are verified by
// their sha256; or of a folder of Triton's with one kernel (triton_notes.h). Throws [file], [hash],
// [image], and [input] for notes of Triton's that are damaged.
std::vector<SourceImage> images_at_path(const std::string& path, bool jit);

}  // namespace torch_cubin
