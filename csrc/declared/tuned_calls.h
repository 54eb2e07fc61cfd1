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

class Contract;

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

// What torch_cubin.tune asks of this thread's calls of one op: each is written down, or is made to run
// one kernel.
struct CallWatch {
  const Contract* contract = nullptr;
  int32_t forced = -1;  // a kernel's number
  // [{"device", "key", "chosen": the kernel that it takes without a table, "fits": [kernels that take
  // it], "same": [those of them with the condition of `chosen`]}]
  nlohmann::json calls = nlohmann::json::array();
};
CallWatch& call_watch();

// Watches this thread's calls of that op, and of no other; null ends it.
void watch_op(const Contract* contract);

// The file in which tune() keeps what it measured of that op on that device, and a process finds it at
// the op's first call: {"path" (null without a cache folder), "gpu", "driver", "op", "hash"}.
// Its name says GPU, driver and what the op does with which images, and so does what it holds.
nlohmann::json tuned_file(const Contract& contract, int32_t device);

// The table in that file; an empty one where there is none, or a damaged one, or one of anything else.
TunedCalls read_tuned_file(const Contract& contract, int32_t device);

// Uses a table {"version", "gpu", "driver", "ops": [{"op", "hash", "calls"}]} from now on, beside what
// is used already. Throws [input] for one of a GPU or driver that this process does not have, or of
// an op that is not declared, or is another one.
void add_tuned_calls(const nlohmann::json& table);

}  // namespace torch_cubin
