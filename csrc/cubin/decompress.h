// LZ4 and zstd decoders for fatbins, and LZMA's for the archives of packages. The output must have
// exactly `size` bytes; otherwise [image] is thrown.
//
// Implemented here, from the formats' documents, because nvcc 13 compresses with zstd, the library
// links nothing that a torch installation may lack, and Python has no zstd before 3.14. Memory
// grows with the data, not with the sizes that a header claims. Includes neither torch nor cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cubin/elf.h"

namespace torch_cubin {

using Buffer = std::vector<uint8_t>;

// One LZ4 block (lz4_Block_format.md) without a frame.
Buffer lz4_decompress(const Bytes& stored, size_t size, const std::string& origin);

// One zstd frame (RFC 8878) without a dictionary. A checksum is not verified: fatbins have none,
// and the output is untrusted anyway.
Buffer zstd_decompress(const Bytes& stored, size_t size, const std::string& origin);

// One LZMA stream behind the header of 13 bytes that Python's lzma.FORMAT_ALONE and `xz
// --format=lzma` write; lc + lp may be at most 4. `size` must not be a number from untrusted data.
Buffer lzma_decompress(const Bytes& stored, size_t size, const std::string& origin);

// Throws [image] for damaged compressed data.
[[noreturn]] void damaged_data(const std::string& origin, const std::string& problem);

// Appends `length` bytes from `distance` before the end; the ranges may overlap. Requires
// 1 <= distance <= out.size().
void copy_match(Buffer& out, size_t distance, size_t length);

}  // namespace torch_cubin
