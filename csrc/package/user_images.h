// What torch_cubin.load() makes of a file's bytes: the images in them, each with its facts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/module.h"

namespace torch_cubin {

// The one place where containers are opened. A file is one source, but each file that
// torch_cubin.embed put into it is one of its own. `origin` names the bytes in errors. PTX is taken only
// with `jit`: it is never compiled behind the user's back.
std::vector<SourceImage> images_of(const uint8_t* data, size_t size, const std::string& origin,
                                   bool jit);

// Adds what one more source gave, so that a module can tell the sources apart (SourceImage::source).
void append_source(std::vector<SourceImage> images, std::vector<SourceImage>& all);

}  // namespace torch_cubin
