// TunedCalls: the quickest kernel of an op that torch_cubin.tune found on one GPU, by call.
//
// A key consists of dtypes, sizes, integers, strings, and the kernel that the call takes without a
// table. That kernel represents everything else that conditions and requirements read, such as
// alignment. The result is only a proposal: the caller checks the kernel's condition and
// requirements as usual.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "declared/call_state.h"
#include "declared/key_table.h"

namespace torch_cubin {

// The components of a key. Floats and strides are included only if a kernel's `when` reads them;
// otherwise each step of a schedule would be a different call.
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

  // The key of a call: the number of `out`'s kMostWords that it uses; 0 if it needs more, or
  // contains a string that is not in `words`.
  size_t write(const CallState& state, const Words& words, int64_t* out) const;

  // The key in a table's form: {"x": ["float16", [2, 3]], "n": 5, "mode": "fast", "bias": null}.
  nlohmann::json shown(const CallState& state) const;

  // Parses a key in the form of shown(); adds strings to `words`. Throws [input] for an invalid
  // one.
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
  // `calls`: [{"key", "kernel", "instead_of": the kernel taken without a table}]; the last entry of
  // a key wins. Throws [input] for an invalid line, or skips it.
  enum OnBadLine : bool { kThrow, kSkip };
  TunedCalls(const nlohmann::json& calls, const CallKey& key, size_t kernels,
             const std::string& label, OnBadLine on_bad_line = kThrow);

  bool empty() const { return calls_.empty(); }
  // The kernel's index; -1 for a call that is not in the table. `instead_of`: the kernel that the
  // call takes without a table.
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
