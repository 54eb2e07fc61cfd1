// LZ4 and zstd, as fatbins hold them: what is stored in, exactly `size` bytes out, or [image].
//
// Decoders of our own, of the two formats' documents: nvcc 13 compresses with zstd, so without one
// most fatbins of today would stay shut; the library links nothing that a torch may lack, and
// Python has no zstd before 3.14. Memory grows with the data, not with the sizes that a header claims.
// Includes neither torch nor cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cubin/elf.h"

namespace torch_cubin {

using Buffer = std::vector<uint8_t>;

// One LZ4 block (lz4_Block_format.md), with no frame around it.
Buffer lz4_decompress(const Bytes& stored, size_t size, const std::string& origin);

// One zstd frame (RFC 8878) without a dictionary. Its checksum, if any, is not compared: fatbins
// carry none, and what comes out is checked as untrusted bytes anyway.
Buffer zstd_decompress(const Bytes& stored, size_t size, const std::string& origin);

// Throws [image]: the compressed data are damaged.
[[noreturn]] void damaged_data(const std::string& origin, const std::string& problem);

// Appends `length` bytes that stand `distance` before the end, repeating them where they overlap.
// The caller has checked 1 <= distance <= out.size().
void copy_match(Buffer& out, size_t distance, size_t length);

}  // namespace torch_cubin
