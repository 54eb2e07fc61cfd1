// KernelLookup: which of a contract's many kernels a call may take, without asking each of them.
//
// Libraries of kernels have hundreds that differ by a dtype, a head size, a kind of mask. What
// their `when` compares with constants becomes the key of a table, so that a call of 800 kernels
// costs what a call of 2 costs. The table only skips kernels whose condition cannot hold: the
// caller still asks the rest, in their order.
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
  // With fewer kernels, asking each of them is as quick.
  static constexpr size_t kLeast = 5;

  // `conditions`: the `when` of each kernel, null for none; they have been read already.
  KernelLookup(const std::vector<const nlohmann::json*>& conditions, const Scope& scope,
               const std::string& label);

  // Calls `take` with the numbers of the kernels that may fit, in their order, until it returns
  // true. False, having called nothing, where the key has no value for these arguments: then each
  // kernel must be asked.
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

  // What of a kernel's condition does not hold: how many parts of it, what these say, and what the
  // arguments are. For errors, where there is time.
  struct Difference {
    size_t parts = 0;
    std::string expected;
    std::vector<std::string> got;
  };
  static Difference difference(const nlohmann::json& condition, const Scope& scope,
                               const CallState& state);

 private:
  static constexpr size_t kMostTables = 8;

  // The kernels whose conditions compare the same things with constants.
  struct Table {
    std::optional<TunedTable> keys;
    std::vector<std::vector<int32_t>> kernels;
  };

  bool look_up(const CallState& state, const std::vector<int32_t>** lists, size_t* count) const;

  std::vector<Table> tables_;
  std::vector<int32_t> others_;  // kernels in no table
};

}  // namespace torch_cubin
