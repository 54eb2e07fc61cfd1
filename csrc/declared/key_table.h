// KeyTable: a hash table of keys of several words, numbered in order of insertion. Lookups do not
// allocate.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace torch_cubin {

class KeyTable {
 public:
  // `most`: keys that will be added.
  explicit KeyTable(size_t most = 0) {
    size_t slots = 2;
    while (slots < 2 * most) slots *= 2;
    slots_.assign(slots, -1);
  }

  // The key's number; -1 if it is missing.
  int32_t find(const int64_t* key, size_t count) const { return slots_[slot(key, count)]; }

  // The number of an existing key; -1 for a new key, which gets the next number.
  int32_t add(const int64_t* key, size_t count) {
    int32_t& place = slots_[slot(key, count)];
    if (place >= 0) return place;
    place = static_cast<int32_t>(ends_.size());
    words_.insert(words_.end(), key, key + count);
    ends_.push_back(words_.size());
    return -1;
  }

 private:
  // The key's slot, or an empty one.
  size_t slot(const int64_t* key, size_t count) const {
    uint64_t hash = count;
    for (size_t i = 0; i < count; ++i) {
      hash = (hash ^ static_cast<uint64_t>(key[i])) * 0x9e3779b97f4a7c15U;
      hash ^= hash >> 29;
    }
    const size_t mask = slots_.size() - 1;
    for (size_t at = hash & mask;; at = (at + 1) & mask) {
      if (slots_[at] < 0) return at;
      const auto number = static_cast<size_t>(slots_[at]);
      const size_t begin = number == 0 ? 0 : ends_[number - 1];
      if (ends_[number] - begin == count && std::equal(key, key + count, &words_[begin])) return at;
    }
  }

  std::vector<int64_t> words_;  // of all keys, one after another
  std::vector<size_t> ends_;    // of each key among them
  std::vector<int32_t> slots_;  // hashed: the keys' numbers, or -1; a power of two of them
};

}  // namespace torch_cubin
