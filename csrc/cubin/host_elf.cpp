// list_host_elf: the fatbins that nvcc and clang put into objects, libraries and programs.
//
// The sections hold fatbins one after another, padded to 8 bytes: the linker joins those of every
// object. Reads section headers only, and less strictly than cubin/elf.cpp does: nothing of the
// host's code is ever given to the driver.
#include "cubin/container.h"
#include "cubin/error.h"

namespace torch_cubin {
namespace {

constexpr uint64_t kSectionHeaderBytes = 64;
constexpr uint32_t kSectionNoBits = 8;
constexpr std::string_view kSections[] = {".nv_fatbin", "__nv_relfatbin"};

[[noreturn]] void damaged(const std::string& origin, const std::string& problem) {
  fail({"image", origin, "is a damaged host ELF file: " + problem, "", "",
        "Build or copy the file again."});
}

// The NUL-terminated name at `offset`, as far as it may matter: the names that do are short.
std::string_view short_name(const Bytes& names, uint64_t offset) {
  if (offset >= names.size()) return {};
  const std::string_view rest = names.text().substr(static_cast<size_t>(offset), 32);
  return rest.substr(0, rest.find('\0'));
}

void list_section(const Bytes& file, uint64_t offset, uint64_t size, std::string_view name,
                  const std::string& origin, std::vector<Entry>& entries) {
  const uint64_t end = offset + size;
  for (uint64_t at = offset; at < end;) {
    if (file.u8(at) == 0) {  // padding
      ++at;
      continue;
    }
    if (entries.size() == kMaxEntries) {
      damaged(origin, "it has more than " + std::to_string(kMaxEntries) + " fatbins");
    }
    const Bytes section(file.data(), static_cast<size_t>(end));
    const uint64_t bytes = fatbin_bytes(section, at, origin);
    Entry fatbin;
    fatbin.format = Format::kFatbin;
    fatbin.name = std::string(name);
    fatbin.offset = at;
    fatbin.stored = Bytes(file.data() + at, static_cast<size_t>(bytes));
    fatbin.size = bytes;
    entries.push_back(fatbin);
    at += bytes;
  }
}

}  // namespace

void list_host_elf(const Bytes& file, const std::string& origin, Container& container) {
  if (!file.contains(0, 64)) damaged(origin, "it is too short for an ELF header");
  container.machine = machine_name(file.u16(18));
  const uint64_t table = file.u64(40), count = file.u16(60), names_index = file.u16(62);
  if (count != 0 && file.u16(58) != kSectionHeaderBytes) {
    damaged(origin, "it has section headers of a wrong size");
  }
  if (!file.contains(table, count * kSectionHeaderBytes)) {
    damaged(origin, "its section headers end past the end of the file");
  }
  const auto bytes_of = [&](uint64_t index) {
    const uint64_t at = table + index * kSectionHeaderBytes;
    const uint64_t offset = file.u64(at + 24), size = file.u64(at + 32);
    if (!file.contains(offset, size)) {
      damaged(origin, "section " + std::to_string(index) + " ends past the end of the file");
    }
    return Bytes(file.data() + offset, static_cast<size_t>(size));
  };
  const Bytes names = names_index < count ? bytes_of(names_index) : Bytes();
  uint64_t total = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t at = table + i * kSectionHeaderBytes;
    if (file.u32(at + 4) == kSectionNoBits) continue;
    const std::string_view name = short_name(names, file.u32(at));
    for (const std::string_view wanted : kSections) {
      if (name != wanted) continue;
      const Bytes section = bytes_of(i);
      // Sections that overlap would let a small file ask for endless work.
      total += section.size();
      if (total > file.size()) damaged(origin, "its sections overlap");
      list_section(file, file.u64(at + 24), section.size(), name, origin, container.entries);
    }
  }
  if (container.entries.empty()) {
    fail({"image", origin,
          "is a host ELF file (" + container.machine + ") without device code in it",
          "a section .nv_fatbin or __nv_relfatbin", "",
          "Compile the kernel with `nvcc -cubin -arch=sm_XY`."});
  }
}

}  // namespace torch_cubin
