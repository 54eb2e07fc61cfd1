// inspect_to_json: everything that can be read from a file, as torch_cubin.inspect returns it.
//
// Includes neither torch nor cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace torch_cubin {

// The facts in a cubin, in PTX, or in a container and all that lies in it, as one JSON object whose
// "kind" is its format_name. docs/inspect.md lists the keys. What is damaged within a container is
// an "error" of its entry; damage of the file itself, and a file that is none of these, throw
// [image]. What is unpacked stays in proportion to the file, whatever the file claims.
std::string inspect_to_json(const uint8_t* data, size_t size, const std::string& origin);

}  // namespace torch_cubin
