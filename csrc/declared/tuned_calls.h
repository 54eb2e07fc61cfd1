// TunedCalls: which of an op's kernels torch_cubin.tune found quickest on one GPU, by the call.
//
// A key holds what tells two calls apart: dtypes, sizes, integers, strings, and the kernel that the call
// takes without a table. That kernel stands for all that conditions and requirements read beyond the
// rest, alignment for one. What is found is only a proposal: the caller asks the kernel's condition and
// requirements as it does for any other.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "declared/call_state.h"
#include "declared/key_table.h"

namespace torch_cubin {

// What a key is made of. Floats and strides tell calls apart only where a kernel's `when` reads them:
// else each step of a schedule would be a call of its own.
class CallKey {
 public:
  static constexpr size_t kMostWords = 256;
  using Words = std::vector<std::string>;  // strings of a table, which keys hold by their places

  void add_tensor(size_t place, std::string name) {
    parts_.push_back({Part::kTensor, place, std::move(name)});
  }
  void add_number(size_t place, std::string name) {
    parts_.push_back({Part::kNumber, place, std::move(name)});
  }
  void add_text(size_t place, std::string name) {
    parts_.push_back({Part::kText, place, std::move(name)});
  }
  void add_strides() { has_strides_ = true; }

  // The key of a call: how many of `out`'s kMostWords it takes; 0 for one that takes more, or that
  // holds a string which is none of `words`.
  size_t write(const CallState& state, const Words& words, int64_t* out) const;

  // As a table says it: {"x": ["float16", [2, 3]], "n": 5, "mode": "fast", "bias": null}.
  nlohmann::json shown(const CallState& state) const;

  // The key that shown() gave; adds strings to `words`. Throws [input] for what is none.
  std::vector<int64_t> read(const nlohmann::json& key, const std::string& label,
                            Words& words) const;

 private:
  struct Part {
    enum Kind : uint8_t { kTensor, kNumber, kText };
    Kind kind;
    size_t place;
    std::string name;
  };

  std::vector<Part> parts_;
  bool has_strides_ = false;
};

class TunedCalls {
 public:
  TunedCalls() = default;
  // `calls`: [{"key", "kernel", "instead_of": the kernel taken without a table}], of which the last
  // counts where two have one key. Throws [input] for a line that is none, or leaves it out.
  enum OnBadLine : bool { kThrow, kSkip };
  TunedCalls(const nlohmann::json& calls, const CallKey& key, size_t kernels,
             const std::string& label, OnBadLine on_bad_line = kThrow);

  bool empty() const { return calls_.empty(); }
  // The kernel's number; -1 for a call that is not in the table. `instead_of`: the kernel that the call
  // takes without a table.
  int32_t find(const CallState& state, const CallKey& key, size_t instead_of) const;
  const nlohmann::json& calls() const { return calls_; }

 private:
  void add(const nlohmann::json& call, const CallKey& key, size_t kernels,
           const std::string& label);

  nlohmann::json calls_ = nlohmann::json::array();
  CallKey::Words words_;
  KeyTable keys_;
  std::vector<int32_t> kernels_;  // by key
};

}  // namespace torch_cubin
