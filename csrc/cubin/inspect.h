// inspect_to_json: all facts in a file, the result of torch_cubin.inspect.
//
// Includes neither torch nor cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace torch_cubin {

// The facts of a cubin, PTX, or a container with its contents, as a JSON object whose "kind" is its
// format_name. docs/inspect.md lists the keys. A damaged entry of a container gets an "error"; a
// damaged file, or one of another format, throws [image]. The unpacked size is bounded in
// proportion to the file.
std::string inspect_to_json(const uint8_t* data, size_t size, const std::string& origin);

}  // namespace torch_cubin
