// The ELF reader. Offsets: System V ABI, "Object Files" (ELF-64). Every offset and size in the file
// is checked against the file's real size before use, in arithmetic that cannot overflow. A cubin
// that refers to bytes beyond its end crashes the driver (measured: cuLibraryLoadData takes no
// length and segfaults on a truncated image).
#include "cubin/elf.h"

#include <cstring>

#include "cubin/error.h"

namespace torch_cubin {
namespace {

constexpr size_t kHeaderBytes = 64;
constexpr size_t kProgramHeaderBytes = 56;
constexpr size_t kSymbolBytes = 24;
constexpr uint32_t kSectionNull = 0;
constexpr uint32_t kSectionSymbolTable = 2;
constexpr uint32_t kSectionStringTable = 3;
// Sections without contents that specify memory sizes in relocatable cubins (LLVM's SHT_CUDA_*).
// Loadable cubins use SHT_NOBITS instead.
constexpr uint32_t kSectionCudaGlobal = 0x70000007;
constexpr uint32_t kSectionCudaLocal = 0x70000009;
constexpr uint32_t kSectionCudaShared = 0x7000000a;
constexpr uint32_t kReservedSections = 0xff00;  // SHN_LORESERVE

std::string bytes_text(uint64_t n) { return counted(n, "byte"); }

}  // namespace

const char* machine_name(uint16_t machine) { return machine == kMachineX86 ? "x86-64" : "aarch64"; }

uint64_t Bytes::read(uint64_t offset, int bytes) const {
  if (!contains(offset, static_cast<uint64_t>(bytes))) {
    fail({"image", "a field at offset " + std::to_string(offset), "lies outside its table",
          "an offset below " + std::to_string(size_), "", "The file is damaged: build it again."});
  }
  uint64_t value = 0;  // the file is little-endian on any machine
  for (int i = bytes - 1; i >= 0; --i) value = value << 8 | data_[offset + i];
  return value;
}

Elf::Elf(const uint8_t* data, size_t size, const std::string& origin)
    : file_(data, size), origin_(origin) {
  if (size > kMaxImageBytes) {
    fail({"image", origin_, "is too large", "at most " + bytes_text(kMaxImageBytes),
          bytes_text(size), "Split it into several cubins."});
  }
  if (size < kHeaderBytes) {
    damaged("is too short for an ELF header", bytes_text(kHeaderBytes), bytes_text(size));
  }
  read_header();
  read_program_headers();
  read_sections();
  check_extent();
  read_symbol_table();
}

void Elf::damaged(const std::string& problem, const std::string& expected,
                  const std::string& got) const {
  fail({"image", origin_, problem, expected, got,
        "The file is damaged, or not what a CUDA compiler writes: build or copy it again."});
}

// Records that the tables refer to [offset, offset + length), which must lie inside the file.
void Elf::cover(uint64_t offset, uint64_t length, const std::string& what) {
  if (!file_.contains(offset, length)) {
    damaged("is truncated: " + what + " ends past the end of the file",
            bytes_text(length) + " at offset " + std::to_string(offset),
            "a file of " + bytes_text(file_.size()));
  }
  if (offset + length > extent_) extent_ = offset + length;
}

void Elf::read_header() {
  header_.os_abi = file_.u8(7);
  header_.abi_version = file_.u8(8);
  header_.type = file_.u16(16);
  header_.machine = file_.u16(18);
  header_.version = file_.u32(20);
  header_.flags = file_.u32(48);
  cover(0, kHeaderBytes, "the ELF header");
  if (file_.u8(6) != 1) damaged("has an unknown ELF version", "1", std::to_string(file_.u8(6)));
  if (file_.u16(52) != kHeaderBytes) {
    damaged("has a wrong ELF header size", std::to_string(kHeaderBytes),
            std::to_string(file_.u16(52)));
  }
}

void Elf::read_program_headers() {
  const uint64_t offset = file_.u64(32);
  const uint64_t entry = file_.u16(54), count = file_.u16(56);
  if (count == 0) return;
  if (entry != kProgramHeaderBytes) {
    damaged("has a wrong program header size", std::to_string(kProgramHeaderBytes),
            std::to_string(entry));
  }
  cover(offset, count * kProgramHeaderBytes, "the program header table");
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t at = offset + i * kProgramHeaderBytes;
    cover(file_.u64(at + 8), file_.u64(at + 32), "segment " + std::to_string(i));
  }
}

void Elf::read_sections() {
  const uint64_t offset = file_.u64(40);
  const uint64_t entry = file_.u16(58), count = file_.u16(60), names = file_.u16(62);
  if (count == 0 || count >= kReservedSections) {
    damaged("has an unsupported number of sections",
            "1 to " + std::to_string(kReservedSections - 1), std::to_string(count));
  }
  if (entry != kSectionHeaderBytes) {
    damaged("has a wrong section header size", std::to_string(kSectionHeaderBytes),
            std::to_string(entry));
  }
  cover(offset, count * kSectionHeaderBytes, "the section header table");
  if (names >= count) {
    damaged("names a section name table that does not exist",
            "an index below " + std::to_string(count), std::to_string(names));
  }
  sections_.reserve(count);
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t at = offset + i * kSectionHeaderBytes;
    ElfSection section;
    section.index = static_cast<uint32_t>(i);
    section.type = file_.u32(at + 4);
    section.flags = file_.u64(at + 8);
    section.size = file_.u64(at + 32);
    section.link = file_.u32(at + 40);
    section.info = file_.u32(at + 44);
    if (!has_no_bytes(section.type)) {
      const uint64_t start = file_.u64(at + 24);
      cover(start, section.size, "section " + std::to_string(i));
      section.bytes = Bytes(file_.data() + start, section.size);
    }
    sections_.push_back(section);
  }
  const ElfSection& table = sections_[names];
  if (table.type != kSectionStringTable) {
    damaged("has a section name table of a wrong type", std::to_string(kSectionStringTable),
            std::to_string(table.type));
  }
  for (ElfSection& section : sections_) {
    if (section.type == kSectionNull) continue;
    const uint64_t at = offset + uint64_t{section.index} * kSectionHeaderBytes;
    section.name = name_at(table.bytes, file_.u32(at), "section " + std::to_string(section.index));
    const auto [entry_at, inserted] = by_name_.emplace(section.name, section.index);
    if (!inserted) entry_at->second = -1;
  }
}

bool Elf::has_no_bytes(uint32_t type) const {
  if (type == kSectionNull || type == kSectionNoBits) return true;
  return header_.type == kElfRelocatable &&
         (type == kSectionCudaGlobal || type == kSectionCudaLocal || type == kSectionCudaShared);
}

// Detects every truncation and every appended byte: in all cubins seen (CUDA 11.8 to 13.0, all
// archs) one of the tables ends the file.
void Elf::check_extent() const {
  if (extent_ == file_.size()) return;
  damaged("has " + bytes_text(file_.size() - extent_) + " after its end", bytes_text(extent_),
          bytes_text(file_.size()));
}

void Elf::read_symbol_table() {
  const ElfSection* table = nullptr;
  for (const ElfSection& section : sections_) {
    if (section.type != kSectionSymbolTable) continue;
    if (table != nullptr) damaged("has two symbol tables", "one");
    table = &section;
  }
  if (table == nullptr) damaged("has no symbol table, so its kernels cannot be found");
  if (table->size % kSymbolBytes != 0) {
    damaged("has a symbol table of a wrong size", "a multiple of " + bytes_text(kSymbolBytes),
            bytes_text(table->size));
  }
  if (table->size / kSymbolBytes > kMaxSymbols) {
    damaged("has too many symbols", "at most " + std::to_string(kMaxSymbols),
            std::to_string(table->size / kSymbolBytes));
  }
  if (table->link >= sections_.size() || sections_[table->link].type != kSectionStringTable) {
    damaged("has a symbol table without a string table", "the index of a string table",
            std::to_string(table->link));
  }
  symbols_ = table->bytes;
  symbol_count_ = static_cast<uint32_t>(table->size / kSymbolBytes);
  symbol_names_ = sections_[table->link].bytes;
}

const ElfSection* Elf::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) return nullptr;
  if (found->second < 0) damaged("has two sections named '" + printable(name) + "'", "one");
  return &sections_[static_cast<size_t>(found->second)];
}

ElfSymbol Elf::symbol(uint32_t index) const {
  const uint64_t at = uint64_t{index} * kSymbolBytes;
  ElfSymbol symbol;
  symbol.name = symbols_.u32(at);
  symbol.type = symbols_.u8(at + 4) & 15;
  symbol.binding = symbols_.u8(at + 4) >> 4;
  symbol.other = symbols_.u8(at + 5);
  symbol.section = symbols_.u16(at + 6);
  symbol.value = symbols_.u64(at + 8);
  symbol.size = symbols_.u64(at + 16);
  return symbol;
}

std::string_view Elf::symbol_name(const ElfSymbol& symbol) {
  return name_at(symbol_names_, symbol.name, "a symbol");
}

// Compares in place, without reading names, so that the limit on names does not apply.
bool Elf::has_symbol(const std::string& name) const {
  const size_t length = name.size() + 1;  // including NUL
  for (uint32_t i = 0; i < symbol_count_; ++i) {
    const uint64_t at = symbol(i).name;
    if (symbol_names_.contains(at, length) &&
        std::memcmp(symbol_names_.data() + at, name.c_str(), length) == 0) {
      return true;
    }
  }
  return false;
}

// Names may overlap, so a small file can have very many long names: both length and total are
// limited.
std::string_view Elf::name_at(const Bytes& table, uint64_t offset, const std::string& what) {
  if (offset >= table.size()) {
    damaged("has a name of " + what + " outside its string table",
            "an offset below " + std::to_string(table.size()), std::to_string(offset));
  }
  const uint64_t left = table.size() - offset;
  const size_t limit = left < kMaxNameBytes ? static_cast<size_t>(left) : kMaxNameBytes;
  const uint8_t* start = table.data() + offset;
  const void* end = std::memchr(start, 0, limit);
  if (end == nullptr) {
    damaged("has a name of " + what + " without an end", "a NUL within " + bytes_text(limit));
  }
  const size_t length = static_cast<size_t>(static_cast<const uint8_t*>(end) - start);
  name_bytes_ += length + 1;
  if (name_bytes_ > kMaxTotalNameBytes) {
    damaged("has too many names", "at most " + bytes_text(kMaxTotalNameBytes) + " of them");
  }
  return {reinterpret_cast<const char*>(start), length};
}

}  // namespace torch_cubin
