// The notes that Triton writes next to a cubin in a cache folder: NAME.json for NAME.cubin, and its
// IR, NAME.ttir, which says of which numbers arguments must be multiples.
#pragma once

#include <string>
#include <vector>

#include "runtime/module.h"

namespace torch_cubin {

// The path itself; for a folder, that of the only cubin in it that has a .json of the same name.
// Throws [file] if there is none, or if there are several, which it lists.
std::string cubin_at(const std::string& path);

// Reads the notes next to a cubin, which say how its kernel is launched; `path` is the cubin or its
// folder. For a folder, the notes complete its launches: throws [file] and [input] if they are
// damaged or require more than that. Next to a cubin, files that are not notes are ignored.
void add_triton_notes(const std::string& path, std::vector<SourceImage>& images);

}  // namespace torch_cubin
