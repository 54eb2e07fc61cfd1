// TunedTable: which group of a contract's kernels a call takes, looked up by values of its arguments.
// Autotuners give such tables: the kernel that was quickest for a key. The cost of a look-up does not
// depend on the number of kernels.
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
  // Reads {"key", "entries", "otherwise"} (docs/manifest.md); `groups`: how many there are. Throws
  // [input].
  TunedTable(const nlohmann::json& object, const Scope& scope, int64_t groups,
             const std::string& label);

  // The group of the call's key, or that of keys which are not in the table.
  int32_t find(const CallState& state) const;
  int32_t otherwise() const { return otherwise_; }

 private:
  // A part of the key: an expression, a tensor's dtype, or a string argument.
  struct Part {
    enum class Kind : uint8_t { kValue, kDtype, kText };
    Kind kind;
    int32_t index = 0;  // of the expression, the tensor or the text
    // Of a number or a fact of a tensor, where the key asks whether that is given, too: its place.
    // Without it the part has no value, and so no entry the key.
    int32_t optional_number = -1, optional_tensor = -1;
    std::vector<std::string> words;  // of the table, which stand in keys by their places
  };

  void read_part(const nlohmann::json& part, const Scope& scope, const std::string& label);
  // Finds the optional number or tensor that a part reads, where another part asks whether it is given.
  static void find_optional(const nlohmann::json& key, const nlohmann::json& json_part,
                            const Scope& scope, Part* part);
  // The word that stands in a key for a value of the table's JSON.
  int64_t read_value(Part& part, const nlohmann::json& value, const std::string& label);
  // The word for a call's own value of that part.
  int64_t value(const Part& part, const CallState& state) const;

  std::vector<Part> parts_;
  std::vector<Expression> expressions_;
  KeyTable keys_;
  std::vector<int32_t> group_;  // by key
  int32_t otherwise_ = 0;
};

}  // namespace torch_cubin
