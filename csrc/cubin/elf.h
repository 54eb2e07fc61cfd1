// Elf: a bounds-checked view of the 64-bit little-endian ELF file around a cubin.
//
// Independent of CUDA except for its machine number. Reads the caller's bytes in place (they must
// outlive it) and throws [image] instead of reading outside of them. Includes neither torch nor
// cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace torch_cubin {

// Limits that bound time and memory. Files that exceed them are refused.
constexpr size_t kMaxImageBytes = size_t{1} << 30;
constexpr uint32_t kMaxSymbols = 1000000;
constexpr size_t kMaxNameBytes = 64 << 10;       // one name
constexpr size_t kMaxTotalNameBytes = 64 << 20;  // all names that are read

constexpr uint32_t kElfMagic = 0x464c457f;  // "\x7f" "ELF"
constexpr uint16_t kElfRelocatable = 1;
constexpr uint16_t kElfExecutable = 2;
constexpr uint16_t kMachineX86 = 62;
constexpr uint16_t kMachineArm = 183;  // aarch64
constexpr uint16_t kMachineCuda = 190;
constexpr uint64_t kSectionHeaderBytes = 64;
constexpr uint32_t kSectionNoBits = 8;

// "x86-64" or "aarch64".
const char* machine_name(uint16_t machine);

// A range of bytes of the file. Reads past its end throw.
class Bytes {
 public:
  Bytes() = default;
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  // Whether [offset, offset + length) lies inside, without overflow.
  bool contains(uint64_t offset, uint64_t length) const {
    return offset <= size_ && length <= size_ - offset;
  }
  uint8_t u8(uint64_t offset) const { return static_cast<uint8_t>(read(offset, 1)); }
  uint16_t u16(uint64_t offset) const { return static_cast<uint16_t>(read(offset, 2)); }
  uint32_t u32(uint64_t offset) const { return static_cast<uint32_t>(read(offset, 4)); }
  uint64_t u64(uint64_t offset) const { return read(offset, 8); }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }

 private:
  uint64_t read(uint64_t offset, int bytes) const;

  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

struct ElfHeader {
  uint8_t os_abi = 0;
  uint8_t abi_version = 0;
  uint16_t type = 0;
  uint16_t machine = 0;
  uint32_t version = 0;
  uint32_t flags = 0;
};

struct ElfSection {
  uint32_t index = 0;
  std::string_view name;
  uint32_t type = 0;
  uint64_t flags = 0;
  uint64_t size = 0;  // also for sections without contents
  Bytes bytes;        // empty for those
  uint32_t link = 0;
  uint32_t info = 0;
};

struct ElfSymbol {
  uint32_t name = 0;  // offset in the string table: Elf::symbol_name
  uint8_t type = 0;
  uint8_t binding = 0;
  uint8_t other = 0;
  uint16_t section = 0;
  uint64_t value = 0;
  uint64_t size = 0;
};

class Elf {
 public:
  // Reads the header and the section table, and checks that the file's tables and contents end
  // exactly at `size`. The caller must have checked that it is a CUDA ELF (cubin/sniff.h). `origin`
  // names the file in errors.
  Elf(const uint8_t* data, size_t size, const std::string& origin);

  const ElfHeader& header() const { return header_; }
  const std::vector<ElfSection>& sections() const { return sections_; }
  // The section of that name, or null. Throws if two sections have it.
  const ElfSection* find(std::string_view name) const;

  uint32_t symbol_count() const { return symbol_count_; }
  ElfSymbol symbol(uint32_t index) const;
  std::string_view symbol_name(const ElfSymbol& symbol);
  bool has_symbol(const std::string& name) const;

  // Throws [image] for an inconsistent or malformed file.
  [[noreturn]] void damaged(const std::string& problem, const std::string& expected = "",
                            const std::string& got = "") const;

 private:
  void read_header();
  void read_program_headers();
  void read_sections();
  void read_symbol_table();
  bool has_no_bytes(uint32_t type) const;
  void check_extent() const;
  void cover(uint64_t offset, uint64_t length, const std::string& what);
  std::string_view name_at(const Bytes& table, uint64_t offset, const std::string& what);

  Bytes file_;
  std::string origin_;
  ElfHeader header_;
  uint64_t extent_ = 0;  // end of the last byte that the tables refer to
  size_t name_bytes_ = 0;
  std::vector<ElfSection> sections_;
  std::unordered_map<std::string_view, int64_t> by_name_;  // -1: several sections
  Bytes symbols_;
  Bytes symbol_names_;
  uint32_t symbol_count_ = 0;
};

}  // namespace torch_cubin
