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

  // For errors: "argument 'n' a multiple of 16", and "1001".
  std::string expected() const;
  std::string got(const CallState& state) const;

 private:
  enum class Kind : uint8_t { kAddress, kMultiple, kEquals, kRange };

  Kind kind_;
  std::string argument_;             // the kernel's name of it
  size_t tensor_ = 0;                // of kAddress
  std::optional<Expression> value_;  // of the others
  Value equals_;
  int64_t least_ = 0;  // of kRange; what a multiple is of
  int64_t most_ = 0;
};

}  // namespace torch_cubin
