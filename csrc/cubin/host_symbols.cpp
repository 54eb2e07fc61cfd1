// list_symbol_images: device code in a host file's read-only or initialised data, found by symbols.
//
//   __tvm_ffi__cubin_NAME                    TVM-FFI's embed tool, torch_cubin.embed with tvm_ffi
//   _binary_FILE_start                       ld -r -b binary, objcopy -I binary
//   kernels_binary in .lrodata               objects that CuTe DSL writes
//   unsigned char kernel_cubin[] = {...}     a compiled C array
//
// A symbol gives an image's possible start, the image itself its size. Bytes that only look like an
// image are skipped, since a program may contain the magic numbers that it searches for.
#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string_view>

#include "cubin/container.h"
#include "cubin/error.h"
#include "cubin/extent.h"

namespace torch_cubin {
namespace {

constexpr size_t kHostSymbolBytes = 24;
constexpr uint32_t kSectionProgramBits = 1, kHostSymbolTable = 2, kHostDynamicSymbols = 11;
constexpr uint64_t kSectionAllocated = 2, kSectionExecutable = 4;
constexpr unsigned kSymbolNoType = 0, kSymbolObject = 1;
constexpr uint16_t kHostRelocatable = 1;
constexpr size_t kMostSymbolName = 256;

struct HostSection {
  uint64_t address, offset, size, flags;
  uint32_t type, link;
};

HostSection host_section(const Bytes& file, uint64_t at) {
  return {file.u64(at + 16), file.u64(at + 24), file.u64(at + 32),
          file.u64(at + 8),  file.u32(at + 4),  file.u32(at + 40)};
}

bool begins_as_image(const Bytes& bytes) {
  if (!bytes.contains(0, 20)) return false;
  if (bytes.u32(0) == kFatbinMagic) return bytes.u16(4) == 1;  // a fatbin, version 1
  return bytes.u32(0) == kElfMagic && bytes.u16(18) == kMachineCuda;
}

std::string host_symbol_name(const Bytes& file, const HostSection& names, uint32_t offset) {
  if (offset >= names.size || !file.contains(names.offset, names.size)) return "";
  const std::string_view rest = file.text().substr(
      static_cast<size_t>(names.offset + offset),
      std::min<size_t>(kMostSymbolName, static_cast<size_t>(names.size - offset)));
  return std::string(rest.substr(0, rest.find('\0')));
}

// The ranges of a file that belong to known images. Adjacent ranges are merged.
class Ranges {
 public:
  void add(uint64_t begin, uint64_t end) {
    auto next = ends_.upper_bound(begin);
    if (next != ends_.begin() && std::prev(next)->second >= begin) {
      --next;
      begin = next->first;
    }
    while (next != ends_.end() && next->first <= end) {
      end = std::max(end, next->second);
      next = ends_.erase(next);
    }
    ends_[begin] = end;
  }

  bool hold(uint64_t offset) const {
    const auto next = ends_.upper_bound(offset);
    return next != ends_.begin() && offset < std::prev(next)->second;
  }

 private:
  std::map<uint64_t, uint64_t> ends_;  // by begin
};

}  // namespace

void list_symbol_images(const Bytes& file, const std::string& origin, std::vector<Entry>& entries) {
  const uint64_t table = file.u64(40), count = file.u16(60);
  const bool relocatable = file.u16(16) == kHostRelocatable;
  // There may be many more symbols than images, so each offset and each image's table is read once,
  // and no list is searched linearly per symbol.
  std::set<uint64_t> looked_at;  // offsets
  Ranges listed;                 // includes the entries of device code sections
  for (const Entry& entry : entries) {
    listed.add(entry.offset, entry.offset + entry.stored.size());
  }
  size_t found = 0;
  uint64_t total = 0, tables = 0;
  const auto refuse_overlaps = [&](bool overlap) {
    if (!overlap) return;
    fail({"image", origin, "is a damaged host ELF file: images that symbols name overlap", "", "",
          "Build or copy the file again."});
  };
  const auto add = [&](const HostSection& names, uint64_t at) {
    const unsigned type = file.u8(at + 4) & 15;
    const uint64_t index = file.u16(at + 6);
    if ((type != kSymbolNoType && type != kSymbolObject) || index == 0 || index >= count) return;
    const HostSection home = host_section(file, table + index * kSectionHeaderBytes);
    if (home.type != kSectionProgramBits ||
        (home.flags & (kSectionAllocated | kSectionExecutable)) != kSectionAllocated) {
      return;
    }
    const uint64_t value = file.u64(at + 8), base = relocatable ? 0 : home.address;
    if (value < base || value - base >= home.size || !file.contains(home.offset, home.size)) return;
    const uint64_t offset = home.offset + (value - base);
    const auto limit = static_cast<size_t>(home.offset + home.size - offset);
    const Bytes rest(file.data() + offset, limit);
    if (!begins_as_image(rest) || listed.hold(offset)) return;
    if (!looked_at.insert(offset).second) return;
    tables += table_bytes_of(rest.data(), rest.size());
    refuse_overlaps(tables > file.size());
    uint64_t size = file.u64(at + 16);
    try {
      size = extent_of(rest.data(), rest.size(), origin);
    } catch (const Error&) {
      // A symbol with a size is an array. Opening the entry reports the damage.
      if (size == 0 || size > limit || rest.u32(0) != kElfMagic) return;
    }
    total += size;
    refuse_overlaps(total > file.size() || found == kMaxEntries);
    ++found;
    listed.add(offset, offset + size);
    Entry entry;
    entry.format = rest.u32(0) == kElfMagic ? Format::kCubin : Format::kFatbin;
    entry.name = host_symbol_name(file, names, file.u32(at));
    entry.offset = offset;
    entry.stored = Bytes(rest.data(), static_cast<size_t>(size));
    entry.size = size;
    entry.is_guess = true;
    entries.push_back(std::move(entry));
  };
  uint64_t symbols = 0;
  for (const uint32_t wanted : {kHostSymbolTable, kHostDynamicSymbols}) {
    for (uint64_t i = 0; i < count; ++i) {
      const HostSection section = host_section(file, table + i * kSectionHeaderBytes);
      if (section.type != wanted || section.link >= count) continue;
      if (!file.contains(section.offset, section.size)) continue;
      // Overlapping tables would let a small file cause unlimited work.
      symbols += section.size;
      if (symbols > file.size()) return;
      const HostSection names = host_section(file, table + section.link * kSectionHeaderBytes);
      for (uint64_t at = 0; at + kHostSymbolBytes <= section.size; at += kHostSymbolBytes) {
        add(names, section.offset + at);
      }
    }
  }
}

}  // namespace torch_cubin
