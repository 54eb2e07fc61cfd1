// KernelLookup: finds the candidate kernels of a call without evaluating every condition.
//
// Kernel libraries have hundreds of kernels that differ by dtype, head size or kind of mask.
// Comparisons with constants in their `when` become the key of a table, so that a call with 800
// kernels costs as much as one with 2. The table only skips kernels whose condition cannot hold:
// the caller evaluates the conditions of the others, in their order.
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "declared/call_state.h"
#include "declared/tuned_table.h"

namespace torch_cubin {

class KernelLookup {
 public:
  // With fewer kernels, evaluating each condition is as fast.
  static constexpr size_t kLeast = 5;

  // `conditions`: the parsed `when` of each kernel, null for none.
  KernelLookup(const std::vector<const nlohmann::json*>& conditions, const Scope& scope,
               const std::string& label);

  // Calls `take` with the indices of the candidate kernels, in order, until it returns true.
  // Returns false without a call if the key has no value for these arguments: then every kernel is
  // a candidate.
  template <class Take>
  bool find(const CallState& state, Take take) const {
    const std::vector<int32_t>* lists[kMostTables + 1];
    size_t at[kMostTables + 1]{};
    size_t count = 0;
    if (!look_up(state, lists, &count)) return false;
    while (true) {
      constexpr int32_t kNone = std::numeric_limits<int32_t>::max();
      int32_t next = kNone;
      size_t from = 0;
      for (size_t i = 0; i < count; ++i) {
        if (at[i] < lists[i]->size() && (*lists[i])[at[i]] < next) {
          next = (*lists[i])[at[i]];
          from = i;
        }
      }
      if (next == kNone || take(static_cast<size_t>(next))) return true;
      ++at[from];
    }
  }

  // The unmet parts of a kernel's condition: their number, their texts, and the actual values. For
  // errors; slow.
  struct Difference {
    size_t parts = 0;
    std::string expected;
    std::vector<std::string> got;
  };
  static Difference difference(const nlohmann::json& condition, const Scope& scope,
                               const CallState& state);

 private:
  static constexpr size_t kMostTables = 8;

  // The kernels whose conditions compare the same expressions with constants.
  struct Table {
    std::optional<TunedTable> keys;
    std::vector<std::vector<int32_t>> kernels;
  };

  bool look_up(const CallState& state, const std::vector<int32_t>** lists, size_t* count) const;

  std::vector<Table> tables_;
  std::vector<int32_t> others_;  // kernels in no table
};

}  // namespace torch_cubin
