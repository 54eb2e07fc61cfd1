// Reading whole files with a size limit; errors say which file and why.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace torch_cubin {

// Throws [file] if the file is missing, unreadable, not a regular file or larger than `limit`.
std::vector<uint8_t> read_file(const std::string& path, size_t limit);

}  // namespace torch_cubin
