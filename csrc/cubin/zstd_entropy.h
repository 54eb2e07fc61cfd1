// The entropy coders of zstd (RFC 8878, section 4): bit streams, FSE tables, Huffman tables.
//
// Throws std::domain_error for damaged data, which zstd.cpp converts to [image].
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cubin/decompress.h"

namespace torch_cubin {

[[noreturn]] void bad_zstd(const char* problem);

int highest_bit(uint64_t value);  // the index of the highest set bit; `value` must not be 0

// A bit stream that is read from its end. Bits before its start read as 0; left() is then negative.
class BackwardBits {
 public:
  explicit BackwardBits(const Bytes& bytes);
  uint64_t read(int count);  // at most 56
  int64_t left() const { return left_; }

 private:
  Bytes bytes_;
  int64_t left_ = 0;
};

struct FseTable {
  struct Cell {
    uint8_t symbol = 0;
    uint8_t bits = 0;
    uint16_t base = 0;
  };
  std::vector<Cell> cells;  // 2^accuracy
  int accuracy = 0;
};

// The counts must sum to 2^accuracy, where -1 counts as 1.
FseTable make_fse_table(const int16_t* counts, size_t symbols, int accuracy);
FseTable make_fse_rle(uint8_t symbol);
// Reads a table's description from `in` at `at`, and moves `at` past it.
FseTable read_fse_table(const Bytes& in, size_t& at, int max_accuracy, size_t max_symbols);

class FseState {
 public:
  FseState(const FseTable& table, BackwardBits& bits)
      : table_(&table), at_(bits.read(table.accuracy)) {}
  uint8_t symbol() const { return table_->cells[at_].symbol; }
  void next(BackwardBits& bits) {
    const FseTable::Cell& cell = table_->cells[at_];
    at_ = cell.base + bits.read(cell.bits);
  }

 private:
  const FseTable* table_;
  size_t at_;
};

struct HuffmanTable {
  struct Cell {
    uint8_t symbol = 0;
    uint8_t bits = 0;
  };
  std::vector<Cell> cells;  // 2^max_bits; empty if not read yet
  int max_bits = 0;
};

HuffmanTable read_huffman_table(const Bytes& in, size_t& at);
// Appends the stream's symbols. Throws unless there are exactly `count`.
void decode_huffman(const HuffmanTable& table, const Bytes& stream, size_t count, Buffer& out);

}  // namespace torch_cubin
