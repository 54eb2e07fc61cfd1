// TunedTable: selects a group of a contract's kernels by values of the arguments. Autotuners
// produce such tables: the quickest kernel for each key. The cost of a lookup does not depend on
// the number of kernels.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "declared/call_state.h"
#include "declared/key_table.h"

namespace torch_cubin {

class TunedTable {
 public:
  // Reads {"key", "entries", "otherwise"} (docs/manifest.md). `groups`: the number of groups.
  // Throws [input].
  TunedTable(const nlohmann::json& object, const Scope& scope, int64_t groups,
             const std::string& label);

  // The group of the call's key, or the default group.
  int32_t find(const CallState& state) const;
  int32_t otherwise() const { return otherwise_; }

 private:
  // A part of the key: an expression, a tensor's dtype, or a string argument.
  struct Part {
    enum class Kind : uint8_t { kValue, kDtype, kText };
    Kind kind;
    int32_t index = 0;  // of the expression, the tensor or the text
    // If another part of the key asks whether this part's number or tensor is given: its index. If
    // it is not given, this part has no value and does not count.
    int32_t optional_number = -1, optional_tensor = -1;
    std::vector<std::string> words;  // strings of the table; keys contain their indices
  };

  void read_part(const nlohmann::json& part, const Scope& scope, const std::string& label);
  // Finds the optional number or tensor of a part, if another part asks whether it is given.
  static void find_optional(const nlohmann::json& key, const nlohmann::json& json_part,
                            const Scope& scope, Part* part);
  // Converts a value of the table's JSON to a key's word.
  int64_t read_value(Part& part, const nlohmann::json& value, const std::string& label);
  // The key's word for a call's value of that part.
  int64_t value(const Part& part, const CallState& state) const;

  std::vector<Part> parts_;
  std::vector<Expression> expressions_;
  KeyTable keys_;
  std::vector<int32_t> group_;  // by key
  int32_t otherwise_ = 0;
};

}  // namespace torch_cubin
