// Requirement: what a kernel's binary takes for granted of one of its arguments, as compilers that
// specialise a kernel do: an address or a number that is a multiple of 16, a number that is 1. Each
// call is checked against it, and a kernel whose requirements do not hold is not chosen.
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

  // The bits of an address that it reads; 0 where it reads none.
  int64_t address_mask() const { return kind_ == Kind::kAddress ? mask_of(least_) : 0; }

  // For errors: "argument 'n' a multiple of 16", and "1001".
  std::string expected() const;
  std::string got(const CallState& state) const;

 private:
  enum class Kind : uint8_t { kAddress, kMultiple, kEquals, kRange };

  // All bits, where they are no power of two.
  static int64_t mask_of(int64_t multiple) {
    return (multiple & (multiple - 1)) == 0 ? multiple - 1 : -1;
  }

  // What calls read comes first.
  Kind kind_;
  size_t tensor_ = 0;                // of kAddress
  int64_t least_ = 0;                // of kRange; what a multiple is of
  std::optional<Expression> value_;  // of all but kAddress
  Value equals_;
  int64_t most_ = 0;
  std::string argument_;  // the kernel's name of it
};

}  // namespace torch_cubin
