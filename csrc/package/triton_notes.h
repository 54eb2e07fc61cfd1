// What Triton writes beside a cubin in a cache folder: NAME.json with NAME.cubin.
#pragma once

#include <string>
#include <vector>

#include "runtime/module.h"

namespace torch_cubin {

// The path itself, and for a folder that of the one cubin in it that has a .json of its name.
// Throws [file] where there is none, or several, whose names it lists.
std::string cubin_at(const std::string& path);

// Notes how the kernel is launched, with what stands beside a cubin; `path` is the cubin's or its
// folder's. From a folder its launches are filled in: throws [file] and [input] where the notes are
// damaged or ask for more than that. Beside a cubin, files that are no notes are ignored.
void add_triton_notes(const std::string& path, std::vector<SourceImage>& images);

}  // namespace torch_cubin
