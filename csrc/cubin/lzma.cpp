// lzma_decompress, after the specification in the LZMA SDK (DOC/lzma-specification.txt).
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cubin/decompress.h"

namespace torch_cubin {
namespace {

constexpr size_t kLzmaHeaderBytes = 13;
// The cheapest symbol, a match of 273 bytes, takes 14 decisions of at least 0.022 bits each.
constexpr size_t kMaxLzmaRatio = 8192;
constexpr int kProbabilityBits = 11;
constexpr int kAdaptation = 5;
constexpr uint32_t kLowestTop = 1u << 24;
constexpr size_t kLzmaStates = 12;
constexpr unsigned kStatesAfterLiterals = 7;  // the first states; the others follow a match
constexpr size_t kMostPositions = 16;
constexpr size_t kShortestMatch = 2;
constexpr size_t kLiteralProbabilities = 0x300;
constexpr unsigned kMostLiteralBits = 4;  // as in liblzma, which limits the tables' size
constexpr uint32_t kEndMarker = UINT32_MAX;

[[noreturn]] void bad_lzma(const char* problem) { throw std::domain_error(problem); }

// The probability that a bit is 0.
using Probability = uint16_t;

template <size_t kCount>
struct Probabilities {
  Probabilities() { std::fill(of, of + kCount, Probability{1} << (kProbabilityBits - 1)); }
  Probability of[kCount];
};

class RangeDecoder {
 public:
  explicit RangeDecoder(const Bytes& in) : next_(in.data()), end_(in.data() + in.size()) {
    if (take() != 0) bad_lzma("their first byte is not zero");
    for (int i = 0; i < 4; ++i) code_ = code_ << 8 | take();
    if (code_ == range_) bad_lzma("their first number is too large");
  }

  unsigned bit(Probability& zero) {
    const uint32_t bound = (range_ >> kProbabilityBits) * zero;
    unsigned found = 0;
    if (code_ < bound) {
      range_ = bound;
      zero = static_cast<Probability>(zero + (((1u << kProbabilityBits) - zero) >> kAdaptation));
    } else {
      range_ -= bound;
      code_ -= bound;
      zero = static_cast<Probability>(zero - (zero >> kAdaptation));
      found = 1;
    }
    normalize();
    return found;
  }

  // A number of `bits` bits, the highest first.
  unsigned tree(Probability* zeros, int bits) {
    unsigned node = 1;
    for (int i = 0; i < bits; ++i) node = node << 1 | bit(zeros[node]);
    return node - (1u << bits);
  }

  // The same, the lowest first.
  unsigned reversed_tree(Probability* zeros, int bits) {
    unsigned node = 1, number = 0;
    for (int i = 0; i < bits; ++i) {
      const unsigned found = bit(zeros[node]);
      node = node << 1 | found;
      number |= found << i;
    }
    return number;
  }

  // A number of equally likely bits.
  uint32_t plain(int bits) {
    uint32_t number = 0;
    for (int i = 0; i < bits; ++i) {
      range_ >>= 1;
      const uint32_t found = code_ >= range_ ? 1 : 0;
      code_ -= range_ & (0 - found);
      number = number << 1 | found;
      normalize();
    }
    return number;
  }

  bool at_end() const { return next_ == end_ && code_ == 0; }

 private:
  uint8_t take() {
    if (next_ == end_) bad_lzma("they end early");
    return *next_++;
  }
  void normalize() {
    if (range_ >= kLowestTop) return;
    range_ <<= 8;
    code_ = code_ << 8 | take();
  }

  const uint8_t* next_;
  const uint8_t* end_;
  uint32_t range_ = UINT32_MAX;
  uint32_t code_ = 0;
};

// The length of a match, less the shortest.
class MatchLengths {
 public:
  unsigned read(RangeDecoder& in, size_t position) {
    if (in.bit(choice_.of[0]) == 0) return in.tree(low_.of + position * 8, 3);
    if (in.bit(choice_.of[1]) == 0) return 8 + in.tree(middle_.of + position * 8, 3);
    return 16 + in.tree(high_.of, 8);
  }

 private:
  Probabilities<2> choice_;
  Probabilities<kMostPositions * 8> low_, middle_;
  Probabilities<256> high_;
};

struct LzmaHeader {
  unsigned literal_bits;     // of the preceding byte, which select a literal's probabilities
  size_t literal_positions;  // the low bits of the offset that do so
  size_t position_mask;      // those that select the other probabilities
  bool has_size;             // else an end marker ends the data
};

LzmaHeader read_lzma_header(const Bytes& in, size_t size) {
  if (!in.contains(0, kLzmaHeaderBytes)) bad_lzma("they end early");
  unsigned properties = in.u8(0);
  if (properties >= 9 * 5 * 5) bad_lzma("their header is damaged");
  LzmaHeader header{};
  header.literal_bits = properties % 9;
  properties /= 9;
  if (header.literal_bits + properties % 5 > kMostLiteralBits) bad_lzma("their header is damaged");
  header.literal_positions = size_t{1} << properties % 5;
  header.position_mask = (size_t{1} << properties / 5) - 1;
  // The size of the dictionary is not needed: the whole output is in memory.
  const uint64_t named = in.u64(5);
  header.has_size = named != UINT64_MAX;
  if (header.has_size && named != size) bad_lzma("their header names another size");
  return header;
}

class LzmaStream {
 public:
  LzmaStream(const Bytes& in, size_t size)
      : header_(read_lzma_header(in, size)),
        in_(Bytes(in.data() + kLzmaHeaderBytes, in.size() - kLzmaHeaderBytes)),
        out_(size),
        literals_((kLiteralProbabilities * header_.literal_positions) << header_.literal_bits,
                  Probability{1} << (kProbabilityBits - 1)) {}

  Buffer read() {
    while (!header_.has_size || at_ < out_.size()) {
      const size_t position = at_ & header_.position_mask;
      if (in_.bit(is_match_.of[state_ * kMostPositions + position]) == 0) {
        read_literal();
      } else if (!read_match(position)) {
        break;
      }
    }
    if (at_ != out_.size()) bad_lzma("they hold less than their size");
    if (!in_.at_end()) bad_lzma("they have bytes behind their end");
    return std::move(out_);
  }

 private:
  void read_literal();
  bool read_match(size_t position);
  uint32_t read_distance(unsigned length);
  unsigned after_literals() const { return state_ < kStatesAfterLiterals; }
  void check_distance() const {
    if (distance_[0] >= at_) bad_lzma("they copy from before their start");
  }
  void copy(size_t length);

  LzmaHeader header_;
  RangeDecoder in_;
  Buffer out_;
  size_t at_ = 0;
  unsigned state_ = 0;                   // what the latest symbols were
  uint32_t distance_[4] = {0, 0, 0, 0};  // the latest distances, less 1
  std::vector<Probability> literals_;
  Probabilities<kLzmaStates * kMostPositions> is_match_, is_long_repeat_;
  Probabilities<kLzmaStates> is_repeat_, is_older_, is_third_, is_fourth_;
  MatchLengths lengths_, repeat_lengths_;
  Probabilities<4 * 64> slots_;  // of distances, by the match's length
  Probabilities<128> low_distances_;
  Probabilities<16> aligned_;
};

void LzmaStream::read_literal() {
  if (at_ == out_.size()) bad_lzma("they hold more than their size");
  const unsigned before = at_ == 0 ? 0 : out_[at_ - 1];
  const size_t context = ((at_ & (header_.literal_positions - 1)) << header_.literal_bits) +
                         (before >> (8 - header_.literal_bits));
  Probability* zeros = literals_.data() + kLiteralProbabilities * context;
  unsigned symbol = 1;
  if (!after_literals()) {
    // The byte at the latest distance differs from this one; bits count it until they differ.
    check_distance();
    unsigned other = out_[at_ - distance_[0] - 1];
    while (symbol < 0x100) {
      const unsigned expected = other >> 7 & 1;
      other <<= 1;
      const unsigned found = in_.bit(zeros[((1 + expected) << 8) + symbol]);
      symbol = symbol << 1 | found;
      if (found != expected) break;
    }
  }
  while (symbol < 0x100) symbol = symbol << 1 | in_.bit(zeros[symbol]);
  out_[at_++] = static_cast<uint8_t>(symbol);
  state_ = state_ < 4 ? 0 : state_ < 10 ? state_ - 3 : state_ - 6;
}

// Returns false at the end marker.
bool LzmaStream::read_match(size_t position) {
  if (in_.bit(is_repeat_.of[state_]) == 0) {
    std::copy_backward(distance_, distance_ + 3, distance_ + 4);
    const unsigned length = lengths_.read(in_, position);
    state_ = after_literals() ? 7 : 10;
    distance_[0] = read_distance(length);
    if (distance_[0] == kEndMarker) return false;
    copy(length + kShortestMatch);
    return true;
  }
  if (in_.bit(is_older_.of[state_]) == 0) {
    if (in_.bit(is_long_repeat_.of[state_ * kMostPositions + position]) == 0) {
      state_ = after_literals() ? 9 : 11;
      copy(1);
      return true;
    }
  } else {
    int index = 1;
    if (in_.bit(is_third_.of[state_]) != 0) index = 2 + in_.bit(is_fourth_.of[state_]);
    const uint32_t chosen = distance_[index];
    std::copy_backward(distance_, distance_ + index, distance_ + index + 1);
    distance_[0] = chosen;
  }
  const unsigned length = repeat_lengths_.read(in_, position);
  state_ = after_literals() ? 8 : 11;
  copy(length + kShortestMatch);
  return true;
}

uint32_t LzmaStream::read_distance(unsigned length) {
  const unsigned slot = in_.tree(slots_.of + std::min(length, 3u) * 64, 6);
  if (slot < 4) return slot;
  const int bits = static_cast<int>(slot / 2 - 1);
  const uint32_t distance = (2 | (slot & 1)) << bits;
  if (slot < 14) return distance + in_.reversed_tree(low_distances_.of + distance - slot, bits);
  return distance + (in_.plain(bits - 4) << 4) + in_.reversed_tree(aligned_.of, 4);
}

void LzmaStream::copy(size_t length) {
  check_distance();
  if (length > out_.size() - at_) bad_lzma("they hold more than their size");
  const size_t distance = size_t{distance_[0]} + 1;
  uint8_t* to = out_.data() + at_;
  const uint8_t* from = to - distance;
  if (length <= distance) {
    std::memcpy(to, from, length);
  } else {
    for (size_t i = 0; i < length; ++i) to[i] = from[i];  // the ranges overlap
  }
  at_ += length;
}

}  // namespace

Buffer lzma_decompress(const Bytes& stored, size_t size, const std::string& origin) {
  try {
    if (size / kMaxLzmaRatio > stored.size()) bad_lzma("they are too few for their size");
    return LzmaStream(stored, size).read();
  } catch (const std::domain_error& error) {
    damaged_data(origin, std::string("LZMA data: ") + error.what());
  }
}

}  // namespace torch_cubin
