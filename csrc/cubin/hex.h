// Bytes as lower-case hex digits, two per byte. Includes neither torch nor cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace torch_cubin {

constexpr char kHexDigits[] = "0123456789abcdef";

inline std::string hex_text(const uint8_t* data, size_t size) {
  std::string text;
  for (size_t i = 0; i < size; ++i) text += {kHexDigits[data[i] >> 4], kHexDigits[data[i] & 15]};
  return text;
}

inline bool is_hex(std::string_view text) {
  return text.find_first_not_of(std::string_view(kHexDigits, 16)) == std::string_view::npos;
}

// Decodes pairs of hex digits; empty for any other text.
inline std::vector<uint8_t> bytes_of_hex(std::string_view text) {
  std::vector<uint8_t> bytes;
  if (!is_hex(text) || text.size() % 2 != 0) return bytes;
  const auto value = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  for (size_t i = 0; i < text.size(); i += 2) {
    bytes.push_back(static_cast<uint8_t>(16 * value(text[i]) + value(text[i + 1])));
  }
  return bytes;
}

}  // namespace torch_cubin
