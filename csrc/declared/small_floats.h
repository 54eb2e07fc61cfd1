// Conversions of doubles to 16-bit and 32-bit floats, rounded to nearest even as Python's struct
// module and torch_cubin/_kernels/scalars.py do.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace torch_cubin {

// All return false if a finite number is out of range.
inline bool to_float32(double x, float* out) {
  *out = static_cast<float>(x);
  return std::isfinite(*out) || !std::isfinite(x);
}

inline bool to_float16(double x, uint16_t* out) {
  const auto sign = static_cast<uint16_t>(std::signbit(x) ? 0x8000 : 0);
  if (std::isnan(x)) {
    *out = sign | 0x7e00;
    return true;
  }
  const double size = std::fabs(x);
  if (std::isinf(x)) {
    *out = sign | 0x7c00;
    return true;
  }
  int exponent = 0;
  std::frexp(size, &exponent);  // size is in [2^(exponent - 1), 2^exponent)
  // Numbers below 2^-14 have the spacing of those at 2^-14.
  const int step = (size == 0 || exponent - 1 < -14 ? -14 : exponent - 1) - 10;
  const double rounded = std::nearbyint(std::ldexp(size, -step));  // at most 2048
  if (std::ldexp(rounded, step) > 65504) return false;
  // The implicit leading bit carries into the exponent, as rounding up to 2048 does.
  const int biased = step + 10 + 14;
  *out = static_cast<uint16_t>(sign + (biased << 10) + static_cast<int>(rounded));
  return true;
}

inline bool to_bfloat16(double x, uint16_t* out) {
  float single = 0;
  if (!to_float32(x, &single)) return false;
  uint32_t bits = 0;
  std::memcpy(&bits, &single, sizeof(bits));
  if (std::isnan(x)) {
    *out = 0x7fc0;
    return true;
  }
  *out = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  return (*out & 0x7f80) != 0x7f80 || std::isinf(x);
}

}  // namespace torch_cubin
