// What torch_cubin.load() makes of a file's bytes: the images in them, each with its facts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/module.h"

namespace torch_cubin {

// The one place where containers are opened. `origin` names the bytes in errors. PTX is taken only
// with `jit`: it is never compiled behind the user's back.
std::vector<SourceImage> images_of(const uint8_t* data, size_t size, const std::string& origin,
                                   bool jit);

}  // namespace torch_cubin
