// zstd_decompress: frame, blocks, literals, sequences (RFC 8878, section 3).
#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

#include "cubin/decompress.h"
#include "cubin/zstd_entropy.h"

namespace torch_cubin {
namespace {

constexpr uint32_t kZstdMagic = 0xfd2fb528;
constexpr size_t kMaxBlock = 128 << 10;
// Every block may have its own tables. This bounds the work for a hostile frame of tiny blocks.
constexpr size_t kSmallestBlock = 256;

struct Code {
  uint32_t base;
  int bits;
};

constexpr Code kLiteralLengths[] = {
    {0, 0},     {1, 0},      {2, 0},      {3, 0},     {4, 0},   {5, 0},     {6, 0},     {7, 0},
    {8, 0},     {9, 0},      {10, 0},     {11, 0},    {12, 0},  {13, 0},    {14, 0},    {15, 0},
    {16, 1},    {18, 1},     {20, 1},     {22, 1},    {24, 2},  {28, 2},    {32, 3},    {40, 3},
    {48, 4},    {64, 6},     {128, 7},    {256, 8},   {512, 9}, {1024, 10}, {2048, 11}, {4096, 12},
    {8192, 13}, {16384, 14}, {32768, 15}, {65536, 16}};
constexpr Code kMatchLengths[] = {
    {3, 0},     {4, 0},     {5, 0},      {6, 0},      {7, 0},     {8, 0},   {9, 0},     {10, 0},
    {11, 0},    {12, 0},    {13, 0},     {14, 0},     {15, 0},    {16, 0},  {17, 0},    {18, 0},
    {19, 0},    {20, 0},    {21, 0},     {22, 0},     {23, 0},    {24, 0},  {25, 0},    {26, 0},
    {27, 0},    {28, 0},    {29, 0},     {30, 0},     {31, 0},    {32, 0},  {33, 0},    {34, 0},
    {35, 1},    {37, 1},    {39, 1},     {41, 1},     {43, 2},    {47, 2},  {51, 3},    {59, 3},
    {67, 4},    {83, 4},    {99, 5},     {131, 7},    {259, 8},   {515, 9}, {1027, 10}, {2051, 11},
    {4099, 12}, {8195, 13}, {16387, 14}, {32771, 15}, {65539, 16}};

// One of a sequence's three codes: limits of its tables, and the predefined table.
struct CodeKind {
  int max_accuracy;
  size_t symbols;
  int default_accuracy;
  const int16_t* default_counts;
  size_t default_symbols;
};

constexpr int16_t kLiteralLengthCounts[] = {4, 3, 2, 2, 2, 2, 2, 2, 2,  2,  2,  2,
                                            2, 1, 1, 1, 2, 2, 2, 2, 2,  2,  2,  2,
                                            2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1};
constexpr int16_t kOffsetCounts[] = {1, 1, 1, 1, 1, 1, 2, 2, 2, 1,  1,  1,  1,  1, 1,
                                     1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1};
constexpr int16_t kMatchLengthCounts[] = {
    1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,  1,  1,  1,  1,  1,  1, 1,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1};

constexpr CodeKind kLiteralLengthKind = {9, 36, 6, kLiteralLengthCounts,
                                         std::size(kLiteralLengthCounts)};
constexpr CodeKind kOffsetKind = {8, 32, 5, kOffsetCounts, std::size(kOffsetCounts)};
constexpr CodeKind kMatchLengthKind = {9, 53, 6, kMatchLengthCounts, std::size(kMatchLengthCounts)};

class Frame {
 public:
  Frame(const Bytes& in, size_t size) : in_(in), size_(size) {}

  Buffer read() {
    read_header();
    bool last = false;
    for (size_t blocks = 0; !last; ++blocks) {
      if (blocks > 16 + size_ / kSmallestBlock) bad_zstd("there are too many blocks");
      last = read_block();
    }
    if (has_checksum_) at_ += 4;
    if (at_ != in_.size()) bad_zstd("the frame and its bytes end in different places");
    if (out_.size() != size_) bad_zstd("they hold less than their size");
    return std::move(out_);
  }

 private:
  void read_header();
  bool read_block();
  void read_compressed(const Bytes& block);
  Buffer read_literals(const Bytes& block, size_t& at);
  void read_sequences(const Bytes& block, size_t at, const Buffer& literals);
  FseTable read_table(const Bytes& block, size_t& at, unsigned mode, const CodeKind& kind,
                      const FseTable& previous);
  size_t distance_of(uint64_t value, bool no_literals);
  // Throws unless the block may produce `length` more bytes.
  void check_capacity(size_t length) const {
    if (length > block_end_ - out_.size()) bad_zstd("they hold more than their size");
  }
  uint64_t take(size_t bytes);

  Bytes in_;
  size_t size_;
  size_t at_ = 0;
  bool has_checksum_ = false;
  Buffer out_;
  size_t block_end_ = 0;
  // Tables and distances of preceding blocks, which a block may reuse.
  HuffmanTable huffman_;
  FseTable literal_lengths_, offsets_, match_lengths_;
  size_t repeats_[3] = {1, 4, 8};
};

// A little-endian number of up to 8 bytes.
uint64_t number(const Bytes& in, size_t at, size_t bytes) {
  if (!in.contains(at, bytes)) bad_zstd("they end early");
  uint64_t value = 0;
  for (size_t i = bytes; i-- > 0;) value = value << 8 | in.u8(at + i);
  return value;
}

uint64_t Frame::take(size_t bytes) {
  const uint64_t value = number(in_, at_, bytes);
  at_ += bytes;
  return value;
}

void Frame::read_header() {
  if (take(4) != kZstdMagic) bad_zstd("they do not begin as a zstd frame");
  const auto descriptor = static_cast<unsigned>(take(1));
  if ((descriptor & 8) != 0) bad_zstd("the frame has an unknown feature");
  has_checksum_ = (descriptor & 4) != 0;
  const bool single_segment = (descriptor & 32) != 0;
  if (!single_segment) take(1);  // the window size, not needed: the whole output is in memory
  constexpr size_t kDictionaryBytes[] = {0, 1, 2, 4};
  if (take(kDictionaryBytes[descriptor & 3]) != 0) bad_zstd("the frame needs a dictionary");
  const unsigned flag = descriptor >> 6;
  const size_t bytes = flag == 0 ? (single_segment ? 1 : 0) : size_t{1} << flag;
  uint64_t content = take(bytes);
  if (bytes == 2) content += 256;
  if (bytes != 0 && content != size_) bad_zstd("the frame names another size");
}

bool Frame::read_block() {
  const auto header = static_cast<uint32_t>(take(3));
  const size_t length = header >> 3;
  block_end_ = out_.size() + std::min(kMaxBlock, size_ - out_.size());
  switch (header >> 1 & 3) {
    case 0: {
      check_capacity(length);
      if (!in_.contains(at_, length)) bad_zstd("they end early");
      out_.insert(out_.end(), in_.data() + at_, in_.data() + at_ + length);
      at_ += length;
      break;
    }
    case 1: {
      check_capacity(length);
      out_.insert(out_.end(), length, static_cast<uint8_t>(take(1)));
      break;
    }
    case 2: {
      if (length > kMaxBlock) bad_zstd("a block is too large");
      if (!in_.contains(at_, length)) bad_zstd("they end early");
      read_compressed(Bytes(in_.data() + at_, length));
      at_ += length;
      break;
    }
    default:
      bad_zstd("a block has an unknown type");
  }
  return (header & 1) != 0;
}

void Frame::read_compressed(const Bytes& block) {
  size_t at = 0;
  const Buffer literals = read_literals(block, at);
  read_sequences(block, at, literals);
}

Buffer Frame::read_literals(const Bytes& block, size_t& at) {
  const auto first = static_cast<unsigned>(number(block, 0, 1));
  const unsigned type = first & 3, format = first >> 2 & 3;
  Buffer literals;
  if (type < 2) {  // raw, or one byte repeated
    const size_t header = (format & 1) == 0 ? 1 : format == 1 ? 2 : 3;
    const size_t size = number(block, 0, header) >> (header == 1 ? 3 : 4);
    check_capacity(size);
    const size_t stored = type == 0 ? size : 1;
    if (!block.contains(header, stored)) bad_zstd("literals end early");
    const uint8_t* start = block.data() + header;
    type == 0 ? literals.assign(start, start + size) : literals.assign(size, *start);
    at = header + stored;
    return literals;
  }
  const size_t header = format < 2 ? 3 : format + 2;
  const int bits = format < 2 ? 10 : format == 2 ? 14 : 18;
  const uint64_t word = number(block, 0, header) >> 4, mask = (uint64_t{1} << bits) - 1;
  const auto size = static_cast<size_t>(word & mask);
  const auto stored = static_cast<size_t>(word >> bits & mask);
  check_capacity(size);
  if (!block.contains(header, stored)) bad_zstd("literals end early");
  const Bytes data(block.data() + header, stored);
  at = header + stored;

  size_t from = 0;
  if (type == 2) huffman_ = read_huffman_table(data, from);
  if (huffman_.cells.empty()) bad_zstd("a Huffman table is used that was not given");
  literals.reserve(size);
  if (format == 0) {
    decode_huffman(huffman_, Bytes(data.data() + from, stored - from), size, literals);
    return literals;
  }
  const size_t each = (size + 3) / 4;
  if (each * 3 > size) bad_zstd("four streams of literals are too short");
  const uint64_t jump[] = {number(data, from, 2), number(data, from + 2, 2),
                           number(data, from + 4, 2)};
  from += 6;
  for (int i = 0; i < 4; ++i) {
    const uint64_t length = i < 3 ? jump[i] : stored - from;
    if (!data.contains(from, length)) bad_zstd("literals end early");
    decode_huffman(huffman_, Bytes(data.data() + from, static_cast<size_t>(length)),
                   i < 3 ? each : size - 3 * each, literals);
    from += static_cast<size_t>(length);
  }
  return literals;
}

FseTable Frame::read_table(const Bytes& block, size_t& at, unsigned mode, const CodeKind& kind,
                           const FseTable& previous) {
  switch (mode) {
    case 0:
      return make_fse_table(kind.default_counts, kind.default_symbols, kind.default_accuracy);
    case 1: {
      const auto symbol = static_cast<uint8_t>(number(block, at++, 1));
      if (symbol >= kind.symbols) bad_zstd("a sequence has an unknown code");
      return make_fse_rle(symbol);
    }
    case 2:
      return read_fse_table(block, at, kind.max_accuracy, kind.symbols);
    default:
      if (previous.cells.empty()) bad_zstd("a table is used that was not given");
      return previous;
  }
}

void Frame::read_sequences(const Bytes& block, size_t at, const Buffer& literals) {
  size_t count = number(block, at++, 1);
  if (count >= 255) {
    count = number(block, at, 2) + 0x7f00;
    at += 2;
  } else if (count >= 128) {
    count = (count - 128) << 8 | number(block, at++, 1);
  }
  size_t used = 0;
  if (count > 0) {
    const auto modes = static_cast<unsigned>(number(block, at++, 1));
    if ((modes & 3) != 0) bad_zstd("the sequences have an unknown feature");
    literal_lengths_ = read_table(block, at, modes >> 6 & 3, kLiteralLengthKind, literal_lengths_);
    offsets_ = read_table(block, at, modes >> 4 & 3, kOffsetKind, offsets_);
    match_lengths_ = read_table(block, at, modes >> 2 & 3, kMatchLengthKind, match_lengths_);
    if (at > block.size()) bad_zstd("the sequences end early");
    BackwardBits bits(Bytes(block.data() + at, block.size() - at));
    FseState literal_length(literal_lengths_, bits);
    FseState offset(offsets_, bits);
    FseState match_length(match_lengths_, bits);
    for (size_t i = 0; i < count; ++i) {
      if (bits.left() < 0) bad_zstd("the sequences end early");
      const int power = offset.symbol();
      const uint64_t value = (uint64_t{1} << power) + bits.read(power);
      const Code& match = kMatchLengths[match_length.symbol()];
      const size_t length = match.base + static_cast<size_t>(bits.read(match.bits));
      const Code& plain = kLiteralLengths[literal_length.symbol()];
      const size_t before = plain.base + static_cast<size_t>(bits.read(plain.bits));
      if (i + 1 < count) {
        literal_length.next(bits);
        match_length.next(bits);
        offset.next(bits);
      }
      if (before > literals.size() - used)
        bad_zstd("a sequence wants more literals than there are");
      check_capacity(before);
      const auto from = literals.begin() + static_cast<std::ptrdiff_t>(used);
      out_.insert(out_.end(), from, from + static_cast<std::ptrdiff_t>(before));
      used += before;
      const size_t distance = distance_of(value, before == 0);
      if (distance == 0 || distance > out_.size()) bad_zstd("they copy from before their start");
      check_capacity(length);
      copy_match(out_, distance, length);
    }
    if (bits.left() != 0) bad_zstd("the sequences have a wrong length");
  } else if (at != block.size()) {
    bad_zstd("a block has bytes behind its end");
  }
  check_capacity(literals.size() - used);
  out_.insert(out_.end(), literals.begin() + static_cast<std::ptrdiff_t>(used), literals.end());
}

// Values 1 to 3 mean the most recent distances, shifted by one if no literals precede the match.
size_t Frame::distance_of(uint64_t value, bool no_literals) {
  if (value > 3) {
    repeats_[2] = repeats_[1];
    repeats_[1] = repeats_[0];
    return repeats_[0] = static_cast<size_t>(value - 3);
  }
  const size_t index = static_cast<size_t>(value) - 1 + (no_literals ? 1 : 0);
  if (index == 0) return repeats_[0];
  const size_t distance = index < 3 ? repeats_[index] : repeats_[0] - 1;
  if (index > 1) repeats_[2] = repeats_[1];
  repeats_[1] = repeats_[0];
  return repeats_[0] = distance;
}

}  // namespace

Buffer zstd_decompress(const Bytes& stored, size_t size, const std::string& origin) {
  try {
    return Frame(stored, size).read();
  } catch (const std::domain_error& error) {
    damaged_data(origin, std::string("zstd data: ") + error.what());
  }
}

}  // namespace torch_cubin
