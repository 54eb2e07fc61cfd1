// How long the bytes at an address are, where nobody says: by their own header.
//
// Includes neither torch nor cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace torch_cubin {

// The bytes of the cubin, fatbin, PTX text or bundle that begins at `data`, of which `limit` bytes
// can be read. Throws [image] for anything else, and for one that says it is longer than that.
size_t extent_of(const uint8_t* data, size_t limit, const std::string& origin);

// What extent_of() goes through: the bytes of an ELF file's tables that lie in the memory. Who asks
// for many extents bounds their sum.
uint64_t table_bytes_of(const uint8_t* data, size_t limit);

// `size`, less zeros behind a cubin's end: arrays of 8-byte words are filled up with them.
size_t without_padding(const uint8_t* data, size_t size);

}  // namespace torch_cubin
