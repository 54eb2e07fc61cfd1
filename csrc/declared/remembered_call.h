// RememberedCall: what the last calls of ops with several kernels came to, by thread.
//
// Which kernel a call takes, the shape of its launch and the bytes of all arguments but addresses follow
// from its sizes, strides, dtypes, numbers and device, and from how its addresses are aligned. Evaluating
// that again touches some hundred lines of the cache, which the driver's own work has emptied; comparing
// what it follows from touches ten. Arguments are checked against their patterns all the same.
#pragma once

#include <cstdint>
#include <cstring>

#include "runtime/launch_call.h"

namespace torch_cubin {

class Contract;

// What a call's choice follows from, as words.
class CallFacts {
 public:
  static constexpr size_t kMost = 64;

  // False where there is no room.
  bool has_capacity(size_t more) const { return count_ + more <= kMost; }
  void add(int64_t word) {
    words_[count_++] = word;
    sum_ = (sum_ << 5 | sum_ >> 59) + static_cast<uint64_t>(word);
  }
  uint64_t hash() const { return (sum_ * 0x9e3779b97f4a7c15U) >> 32; }

  bool operator==(const CallFacts& other) const {
    return count_ == other.count_ && std::memcmp(words_, other.words_, count_ * 8) == 0;
  }
  CallFacts() = default;
  CallFacts(const CallFacts& other) { *this = other; }
  CallFacts& operator=(const CallFacts& other) {
    count_ = other.count_;
    sum_ = other.sum_;
    std::memcpy(words_, other.words_, count_ * 8);
    return *this;
  }

 private:
  size_t count_ = 0;
  uint64_t sum_ = 0;
  int64_t words_[kMost];  // not initialised: a call writes those that it counts
};

struct RememberedCall {
  static constexpr size_t kMostBytes = 512;  // of packed arguments

  // Contracts are leaked, so an address is one contract's for good.
  const Contract* contract = nullptr;
  uint64_t tables = 0;  // Contract::tables_version_
  uint64_t times = 0;   // that this was filled: a call within a call, by an allocator, may do so
  const void* launch = nullptr;
  torch_cubin_launch_call shape{};
  CallFacts facts;
  alignas(16) uint8_t bytes[kMostBytes];
};

constexpr size_t kRememberedCalls = 16;  // a thread's

}  // namespace torch_cubin
