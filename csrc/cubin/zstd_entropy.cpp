// FSE and Huffman decoding. Tables are built by the procedures of RFC 8878.
#include "cubin/zstd_entropy.h"

#include <stdexcept>
#include <utility>

namespace torch_cubin {
namespace {

constexpr int kMinAccuracy = 5;
constexpr int kMaxHuffmanBits = 11;
constexpr int kMaxWeightAccuracy = 6;
constexpr size_t kMaxWeights = 255;  // the 256th is implied

// Reads bits from the start of the bytes, low bits first. Only table descriptions use this order.
class ForwardBits {
 public:
  ForwardBits(const Bytes& bytes, size_t at) : bytes_(bytes), bit_(uint64_t{at} * 8) {}
  uint32_t read(int count) {
    uint32_t value = 0;
    for (int i = 0; i < count; ++i, ++bit_) {
      if (bit_ / 8 >= bytes_.size()) bad_zstd("a table's description ends early");
      value |= static_cast<uint32_t>(bytes_.u8(bit_ / 8) >> (bit_ % 8) & 1) << i;
    }
    return value;
  }
  void unread_one() { --bit_; }
  size_t byte_behind() const { return static_cast<size_t>((bit_ + 7) / 8); }

 private:
  Bytes bytes_;
  uint64_t bit_;
};

// Decodes with the two interleaved states of section 4.2.1.2 until the stream ends.
std::vector<uint8_t> decode_weights(const FseTable& table, const Bytes& stream) {
  BackwardBits bits(stream);
  FseState even(table, bits), odd(table, bits);
  if (bits.left() < 0) bad_zstd("Huffman weights end early");
  std::vector<uint8_t> weights;
  FseState* turn = &even;
  FseState* other = &odd;
  while (true) {
    if (weights.size() >= kMaxWeights - 1) bad_zstd("there are too many Huffman weights");
    weights.push_back(turn->symbol());
    turn->next(bits);
    if (bits.left() < 0) {
      weights.push_back(other->symbol());
      return weights;
    }
    std::swap(turn, other);
  }
}

std::vector<uint8_t> read_weights(const Bytes& in, size_t& at) {
  if (!in.contains(at, 1)) bad_zstd("the Huffman table is missing");
  const size_t header = in.u8(at++);
  std::vector<uint8_t> weights;
  if (header >= 128) {  // four bits each
    const size_t count = header - 127;
    if (!in.contains(at, (count + 1) / 2)) bad_zstd("Huffman weights end early");
    for (size_t i = 0; i < count; ++i) {
      const uint8_t pair = in.u8(at + i / 2);
      weights.push_back(i % 2 == 0 ? pair >> 4 : pair & 15);
    }
    at += (count + 1) / 2;
    return weights;
  }
  if (!in.contains(at, header)) bad_zstd("Huffman weights end early");
  const Bytes description(in.data() + at, header);
  size_t behind = 0;
  const FseTable table =
      read_fse_table(description, behind, kMaxWeightAccuracy, kMaxHuffmanBits + 1);
  at += header;
  return decode_weights(table, Bytes(description.data() + behind, header - behind));
}

}  // namespace

void bad_zstd(const char* problem) { throw std::domain_error(problem); }

int highest_bit(uint64_t value) {
  int bit = 0;
  while (value >>= 1) ++bit;
  return bit;
}

BackwardBits::BackwardBits(const Bytes& bytes) : bytes_(bytes) {
  if (bytes.size() == 0 || bytes.u8(bytes.size() - 1) == 0) bad_zstd("a bit stream has no end");
  // The highest set bit marks the stream's end.
  left_ = static_cast<int64_t>(bytes.size() - 1) * 8 + highest_bit(bytes.u8(bytes.size() - 1));
}

uint64_t BackwardBits::read(int count) {
  left_ -= count;
  if (count == 0 || left_ + count <= 0) return 0;
  const int missing = left_ < 0 ? static_cast<int>(-left_) : 0;  // below `count`
  const auto from = static_cast<uint64_t>(left_ < 0 ? 0 : left_);
  const auto first = static_cast<size_t>(from / 8);
  const uint8_t* start = bytes_.data() + first;
  const size_t inside = bytes_.size() - first;
  uint64_t word = 0;
  if (inside >= 8) {  // the common case, separate so that it compiles to one load
    for (int i = 0; i < 8; ++i) word |= uint64_t{start[i]} << (8 * i);
  } else {
    for (size_t i = 0; i < inside; ++i) word |= uint64_t{start[i]} << (8 * i);
  }
  const uint64_t value = word >> (from % 8) & ((uint64_t{1} << (count - missing)) - 1);
  return value << missing;
}

FseTable make_fse_table(const int16_t* counts, size_t symbols, int accuracy) {
  FseTable table;
  table.accuracy = accuracy;
  const size_t size = size_t{1} << accuracy;
  table.cells.resize(size);
  std::array<uint32_t, 256> next{};
  size_t high = size;  // symbols with a probability below one cell are at the end
  for (size_t s = 0; s < symbols; ++s) {
    if (counts[s] != -1) continue;
    table.cells[--high].symbol = static_cast<uint8_t>(s);
    next[s] = 1;
  }
  const size_t step = (size >> 1) + (size >> 3) + 3;
  size_t at = 0;
  for (size_t s = 0; s < symbols; ++s) {
    if (counts[s] <= 0) continue;
    next[s] = static_cast<uint32_t>(counts[s]);
    for (int i = 0; i < counts[s]; ++i) {
      table.cells[at].symbol = static_cast<uint8_t>(s);
      do {
        at = (at + step) & (size - 1);
      } while (at >= high);
    }
  }
  for (FseTable::Cell& cell : table.cells) {
    const uint32_t state = next[cell.symbol]++;
    cell.bits = static_cast<uint8_t>(accuracy - highest_bit(state));
    cell.base = static_cast<uint16_t>((state << cell.bits) - size);
  }
  return table;
}

FseTable make_fse_rle(uint8_t symbol) {
  FseTable table;
  table.cells.push_back({symbol, 0, 0});
  return table;
}

FseTable read_fse_table(const Bytes& in, size_t& at, int max_accuracy, size_t max_symbols) {
  ForwardBits bits(in, at);
  const int accuracy = static_cast<int>(bits.read(4)) + kMinAccuracy;
  if (accuracy > max_accuracy) bad_zstd("a table is too large");
  int remaining = 1 << accuracy;
  std::vector<int16_t> counts;
  while (remaining > 0) {
    if (counts.size() >= max_symbols) bad_zstd("a table has too many symbols");
    // The remaining probability determines a value's number of bits; small values have one bit
    // less.
    const int width = highest_bit(static_cast<uint64_t>(remaining) + 1) + 1;
    const int low_mask = (1 << (width - 1)) - 1;
    const int threshold = (1 << width) - 1 - (remaining + 1);
    int value = static_cast<int>(bits.read(width));
    if ((value & low_mask) < threshold) {
      bits.unread_one();
      value &= low_mask;
    } else if (value > low_mask) {
      value -= threshold;
    }
    const int count = value - 1;
    remaining -= count < 0 ? 1 : count;
    counts.push_back(static_cast<int16_t>(count));
    if (count != 0) continue;
    for (uint32_t zeros = 3; zeros == 3;) {  // runs of unused symbols
      zeros = bits.read(2);
      counts.insert(counts.end(), zeros, 0);
      if (counts.size() > max_symbols) bad_zstd("a table has too many symbols");
    }
  }
  if (remaining != 0) bad_zstd("a table's probabilities do not add up");
  at = bits.byte_behind();
  return make_fse_table(counts.data(), counts.size(), accuracy);
}

HuffmanTable read_huffman_table(const Bytes& in, size_t& at) {
  std::vector<uint8_t> weights = read_weights(in, at);
  uint64_t sum = 0;
  for (const uint8_t weight : weights) {
    if (weight > kMaxHuffmanBits) bad_zstd("a Huffman weight is too large");
    if (weight > 0) sum += uint64_t{1} << (weight - 1);
  }
  if (sum == 0) bad_zstd("the Huffman table is empty");
  HuffmanTable table;
  table.max_bits = highest_bit(sum) + 1;
  if (table.max_bits > kMaxHuffmanBits) bad_zstd("the Huffman table is too deep");
  const uint64_t left = (uint64_t{1} << table.max_bits) - sum;
  if ((left & (left - 1)) != 0) bad_zstd("the Huffman weights do not add up");
  weights.push_back(static_cast<uint8_t>(highest_bit(left) + 1));
  // Sorted by code length, the longest first, then by symbol.
  for (int weight = 1; weight <= table.max_bits; ++weight) {
    const auto bits = static_cast<uint8_t>(table.max_bits + 1 - weight);
    for (size_t symbol = 0; symbol < weights.size(); ++symbol) {
      if (weights[symbol] != weight) continue;
      table.cells.insert(table.cells.end(), size_t{1} << (weight - 1),
                         {static_cast<uint8_t>(symbol), bits});
    }
  }
  if (table.cells.size() != size_t{1} << table.max_bits) {
    bad_zstd("the Huffman weights do not add up");
  }
  return table;
}

void decode_huffman(const HuffmanTable& table, const Bytes& stream, size_t count, Buffer& out) {
  BackwardBits bits(stream);
  const size_t mask = table.cells.size() - 1;
  size_t state = bits.read(table.max_bits);
  const size_t end = out.size() + count;
  while (bits.left() > -table.max_bits) {
    if (out.size() == end) bad_zstd("a Huffman stream is too long");
    const HuffmanTable::Cell& cell = table.cells[state];
    out.push_back(cell.symbol);
    state = (state << cell.bits | bits.read(cell.bits)) & mask;
  }
  if (bits.left() != -table.max_bits || out.size() != end) {
    bad_zstd("a Huffman stream has a wrong length");
  }
}

}  // namespace torch_cubin
