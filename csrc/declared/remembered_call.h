// RememberedCall: a cache of resolved calls of ops with several kernels, by thread.
//
// The kernel, the launch shape and the packed arguments (except addresses) are functions of sizes,
// strides, dtypes, numbers, the device and the alignment of addresses. Evaluating them again would
// touch about a hundred cache lines, which the driver has evicted; comparing the inputs touches
// ten. Arguments are still checked against their patterns.
#pragma once

#include <cstdint>
#include <cstring>

#include "runtime/launch_call.h"

namespace torch_cubin {

class Contract;

// The inputs of a call's resolution, as words.
class CallFacts {
 public:
  static constexpr size_t kMost = 64;

  // Whether `more` words fit.
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
    if (this == &other) return *this;
    count_ = other.count_;
    sum_ = other.sum_;
    std::memcpy(words_, other.words_, count_ * 8);
    return *this;
  }

 private:
  size_t count_ = 0;
  uint64_t sum_ = 0;
  int64_t words_[kMost];  // uninitialised beyond count_
};

struct RememberedCall {
  static constexpr size_t kMostBytes = 512;  // of packed arguments

  // Contracts are leaked, so an address identifies a contract.
  const Contract* contract = nullptr;
  uint64_t tables = 0;  // Contract::tables_version_
  uint64_t times = 0;  // how often this was filled: a nested call (from an allocator) may refill it
  const void* launch = nullptr;
  torch_cubin_launch_call shape{};
  CallFacts facts;
  alignas(16) uint8_t bytes[kMostBytes];
};

constexpr size_t kRememberedCalls = 16;  // a thread's

}  // namespace torch_cubin
