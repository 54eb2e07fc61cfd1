// The images in a file's bytes, for torch_cubin.load().
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/module.h"

namespace torch_cubin {

// The images of the bytes and of the containers in them. A file is one source, but each file that
// torch_cubin.embed put into it is a source of its own. `origin` names the bytes in errors. PTX is
// accepted only with `jit`: it is never compiled implicitly.
std::vector<SourceImage> images_of(const uint8_t* data, size_t size, const std::string& origin,
                                   bool jit);

// Appends the images of another source, renumbered so that a module can distinguish the sources
// (SourceImage::source).
void append_source(std::vector<SourceImage> images, std::vector<SourceImage>& all);

}  // namespace torch_cubin
