// A fuzz target: a function of the bytes of one format. Each file of tests/fuzz registers its
// own; main.cpp runs the one that FUZZ_FORMAT names, under libFuzzer or over given files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cubin/error.h"

namespace fuzz {

struct Target {
  const char* format;
  // The bytes lie in a block of exactly `size`, so that AddressSanitizer sees the first byte read
  // past its end.
  void (*run)(const uint8_t* data, size_t size);
  // One mutation that knows the format, in place of libFuzzer's own half of the time; null for
  // formats whose bytes have no structure. Gives the new size, or 0 where the bytes lack what it
  // would change.
  size_t (*mutate)(uint8_t* data, size_t size, size_t most, uint32_t seed);
};

std::vector<Target>& targets();

struct Register {
  explicit Register(const Target& target) { targets().push_back(target); }
};

// Ends the program, so that the fuzzer keeps the input.
inline void require(bool condition) {
  if (!condition) __builtin_trap();
}

// Runs `body`, which may refuse the input with one of those tags, and with no other error.
template <class Body>
bool accepts(std::initializer_list<std::string_view> tags, Body&& body) {
  try {
    body();
    return true;
  } catch (const torch_cubin::Error& error) {
    bool known = false;
    for (const std::string_view tag : tags) known |= error.tag() == tag;
    if (!known) std::fprintf(stderr, "an unexpected error: %s\n", error.what());
    require(known && torch_cubin::last_error() == error.what());
    return false;
  }
}

// A value that parsers trip over, near `old` or near the file's size.
uint64_t odd_value(uint32_t choice, uint64_t old, size_t size);

// Rewrites one little-endian field of 1, 2, 4 or 8 bytes in [begin, end) with an odd value.
size_t rewrite_field(uint8_t* data, size_t size, uint64_t begin, uint64_t end, uint32_t seed);

}  // namespace fuzz
