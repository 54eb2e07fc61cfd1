// Changes one field of one table of an ELF file: random bytes alone seldom get past the first
// table.
#pragma once

#include "target.h"

namespace fuzz {

inline size_t mutate_elf(uint8_t* data, size_t size, size_t, uint32_t seed) {
  if (size < 64) return 0;
  const auto load = [&](size_t at, size_t width) {
    uint64_t value = 0;
    std::memcpy(&value, data + at, width);
    return value;
  };
  const uint64_t sections = load(40, 8), count = load(60, 2);
  uint64_t begin = 0, end = 64;  // the ELF header, or a section header, or a section
  if (seed % 8 != 0 && count > 0 && sections <= size && count * 64 <= size - sections) {
    begin = sections + seed / 8 % count * 64;
    end = begin + 64;
    const uint64_t start = load(begin + 24, 8), length = load(begin + 32, 8);
    if (seed / 4096 % 2 == 0 && start <= size && length <= size - start && length > 0) {
      begin = start;
      end = start + length;
    }
  }
  return rewrite_field(data, size, begin, end, seed * 2654435761u);
}

}  // namespace fuzz
