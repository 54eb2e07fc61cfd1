// The size of an image at an address, from its own header.
//
// Includes neither torch nor cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace torch_cubin {

// The size of the cubin, fatbin, PTX, C source or bundle at `data`, of which `limit` bytes can be
// read. Throws [image] for any other format and for a size above `limit`.
size_t extent_of(const uint8_t* data, size_t limit, const std::string& origin);

// The cost of extent_of(): the bytes of an ELF file's tables within `limit`. Callers that request
// many extents must bound the sum.
uint64_t table_bytes_of(const uint8_t* data, size_t limit);

// `size` without the zeros after a cubin's end, which pad arrays of 8-byte words.
size_t without_padding(const uint8_t* data, size_t size);

}  // namespace torch_cubin
