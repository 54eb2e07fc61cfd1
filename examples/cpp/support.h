// Shared by the examples: fp16 on the host, and the check of results.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

namespace example {

// The status of main() for wrong arguments.
inline int usage(const char* command) {
  std::fprintf(stderr, "usage: %s\n", command);
  return 2;
}

// fp16 bits of a finite number, rounded toward zero.
inline uint16_t to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t sign = bits >> 16 & 0x8000, exponent = bits >> 23 & 255;
  if (exponent < 113) return static_cast<uint16_t>(sign);  // below 2^-14: zero will do here
  return static_cast<uint16_t>(sign | (exponent - 112) << 10 | (bits >> 13 & 0x3ff));
}

inline float to_float(uint16_t half) {
  const uint32_t exponent = half >> 10 & 31;
  if (exponent == 0) return 0;
  const uint32_t bits = (half & 0x8000u) << 16 | (exponent + 112) << 23 | (half & 0x3ffu) << 13;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// A fixed sequence of integers from -4 to 4.
inline int small_number(size_t i) { return static_cast<int>((i * 2654435761u >> 7) % 9) - 4; }

// The status of main(): 1 if a number is off by more than `limit`, else 0.
template <class Got>
int compare(const char* name, const std::vector<Got>& got, const std::vector<double>& expected,
            double limit) {
  double largest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double difference = std::fabs(static_cast<double>(got[i]) - expected[i]);
    if (!(difference <= largest)) largest = difference;  // NaN, too
  }
  const bool right = got.size() == expected.size() && largest <= limit;
  std::printf("%s: %zu numbers, largest difference %g: %s\n", name, got.size(), largest,
              right ? "right" : "WRONG");
  return right ? 0 : 1;
}

// C = A B of small integers, exactly.
inline std::vector<double> product(const std::vector<uint16_t>& a, const std::vector<uint16_t>& b,
                                   int m, int n, int k) {
  std::vector<float> left(a.size()), right(b.size()), sum(static_cast<size_t>(m) * n);
  for (size_t i = 0; i < a.size(); ++i) left[i] = to_float(a[i]);
  for (size_t i = 0; i < b.size(); ++i) right[i] = to_float(b[i]);
  for (int i = 0; i < m; ++i) {
    for (int l = 0; l < k; ++l) {
      for (int j = 0; j < n; ++j) sum[i * n + j] += left[i * k + l] * right[l * n + j];
    }
  }
  return {sum.begin(), sum.end()};
}

}  // namespace example
