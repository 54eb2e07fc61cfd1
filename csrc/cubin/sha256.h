// SHA-256 (FIPS 180-4), for verifying images. Includes neither torch nor cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace torch_cubin {

// 64 lower-case hex digits.
std::string sha256_hex(const uint8_t* data, size_t size);

}  // namespace torch_cubin
