// Reading whole files with a size limit; errors say which file and why.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace torch_cubin {

// Throws [file] if the file is missing, unreadable, not a regular file or larger than `limit`.
std::vector<uint8_t> read_file(const std::string& path, size_t limit);

// Whether it is one that can be read; false for a folder, and where there is nothing.
bool is_regular_file(const std::string& path);

// How many bytes from `address` on this process may read, by the kernel's list of its memory; 0 where
// none or where there is no such list.
size_t readable_bytes(const void* address);

}  // namespace torch_cubin
