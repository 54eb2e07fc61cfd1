// Reads whole files with a size limit. Errors name the file and the reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace torch_cubin {

// Throws [file] if the file is missing, unreadable, not a regular file or larger than `limit`.
std::vector<uint8_t> read_file(const std::string& path, size_t limit);

// Whether the path is a readable regular file; false for a folder and for a missing file.
bool is_regular_file(const std::string& path);

// The number of bytes from `address` on that this process may read, from the OS's list of mappings;
// 0 if there are none or the list is not available.
size_t readable_bytes(const void* address);

}  // namespace torch_cubin
