// Requirement: an assumption of a kernel's binary about one argument, as made by compilers that
// specialise kernels: an address or a number is a multiple of 16, or a number is 1. Each call is
// checked, and a kernel whose requirements do not hold is not selected.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "declared/call_state.h"

namespace torch_cubin {

class Requirement {
 public:
  // Reads {"argument", "value" or "address_of", "multiple_of" or "equals" or "at_least" and
  // "at_most"} (docs/manifest.md). Throws [input].
  Requirement(const nlohmann::json& object, const Scope& scope, const std::string& label);

  bool holds(const CallState& state) const;

  // The bits of an address that it depends on; 0 if it does not depend on an address.
  int64_t address_mask() const { return kind_ == Kind::kAddress ? mask_of(least_) : 0; }

  // Texts for errors: "argument 'n' a multiple of 16", and "1001".
  std::string expected() const;
  std::string got(const CallState& state) const;

 private:
  enum class Kind : uint8_t { kAddress, kMultiple, kEquals, kRange };

  // All bits for a multiple that is not a power of two.
  static int64_t mask_of(int64_t multiple) {
    return (multiple & (multiple - 1)) == 0 ? multiple - 1 : -1;
  }

  // Members that calls read come first.
  Kind kind_;
  size_t tensor_ = 0;                // of kAddress
  int64_t least_ = 0;                // lower end of kRange; the divisor of a multiple
  std::optional<Expression> value_;  // for all but kAddress
  Value equals_;
  int64_t most_ = 0;
  std::string argument_;  // its name in the kernel
};

}  // namespace torch_cubin
