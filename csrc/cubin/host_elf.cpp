// list_host_elf: the fatbins that nvcc and clang put into objects, libraries and programs, and the
// files that torch_cubin.embed put there (cubin/embedded.h).
//
// The linker concatenates the fatbins of all objects in a section, padded to 8 bytes. Reads only
// section headers, less strictly than cubin/elf.cpp, since the driver never gets the host file.
#include "cubin/container.h"
#include "cubin/embedded.h"
#include "cubin/error.h"

namespace torch_cubin {
namespace {

constexpr std::string_view kSections[] = {".nv_fatbin", "__nv_relfatbin", kEmbeddedSection};

[[noreturn]] void damaged_host_elf(const std::string& origin, const std::string& problem) {
  fail({"image", origin, "is a damaged host ELF file: " + problem, "", "",
        "Build or copy the file again."});
}

// The beginning of the NUL-terminated name at `offset`; all names of interest are short.
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
      damaged_host_elf(origin, "it has more than " + std::to_string(kMaxEntries) + " fatbins");
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

// Adds the device code of embedded bundles; other files, such as manifests, are not entries.
void list_files(const std::vector<Bundle>& bundles, std::vector<Entry>& entries) {
  for (const Bundle& bundle : bundles) {
    const bool in_package = is_package(bundle);
    for (const EmbeddedFile& file : bundle) {
      const Format format = sniff(file.bytes.data(), file.bytes.size(), file.name).format;
      if (format == Format::kText) continue;
      Entry entry;
      const bool nests = format == Format::kHostElf || format == Format::kStaticLibrary;
      entry.format = nests ? Format::kOther : format;
      entry.name = file.name;
      entry.offset = file.offset;
      entry.stored = file.bytes;
      entry.size = file.bytes.size();
      entry.is_file = true;
      entry.in_package = in_package;
      entries.push_back(entry);
    }
  }
}

// Calls visit(name, offset, size) for each section with contents in the file.
template <class Visit>
void for_each_section(const Bytes& file, const std::string& origin, Visit visit) {
  if (!file.contains(0, 64)) damaged_host_elf(origin, "it is too short for an ELF header");
  const uint64_t table = file.u64(40), count = file.u16(60), names_index = file.u16(62);
  if (count != 0 && file.u16(58) != kSectionHeaderBytes) {
    damaged_host_elf(origin, "it has section headers of a wrong size");
  }
  if (!file.contains(table, count * kSectionHeaderBytes)) {
    damaged_host_elf(origin, "its section headers end past the end of the file");
  }
  const auto bytes_of = [&](uint64_t index) {
    const uint64_t at = table + index * kSectionHeaderBytes;
    const uint64_t offset = file.u64(at + 24), size = file.u64(at + 32);
    if (!file.contains(offset, size)) {
      damaged_host_elf(origin,
                       "section " + std::to_string(index) + " ends past the end of the file");
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
      const uint64_t size = bytes_of(i).size();
      // Overlapping sections would let a small file cause unlimited work.
      total += size;
      if (total > file.size()) damaged_host_elf(origin, "its sections overlap");
      visit(name, file.u64(at + 24), size);
    }
  }
}

}  // namespace

void list_host_elf_entries(const Bytes& file, const std::string& origin, Container& container) {
  std::vector<Bundle> bundles;
  for_each_section(file, origin, [&](std::string_view name, uint64_t offset, uint64_t size) {
    if (name == kEmbeddedSection) {
      list_bundles(file, offset, offset + size, origin, bundles);
    } else {
      list_section(file, offset, size, name, origin, container.entries);
    }
  });
  list_files(bundles, container.entries);
  list_symbol_images(file, origin, container.entries);
  container.machine = machine_name(file.u16(18));
}

void list_host_elf(const Bytes& file, const std::string& origin, Container& container) {
  list_host_elf_entries(file, origin, container);
  if (container.entries.empty()) {
    fail({"image", origin,
          "is a host ELF file (" + container.machine + ") without device code in it",
          "a section .nv_fatbin, __nv_relfatbin or .torch_cubin, or a symbol of an image in its "
          "data",
          "", "Compile the kernel with `nvcc -cubin -arch=sm_XY`."});
  }
}

std::vector<Bundle> embedded_bundles(const Bytes& library, const std::string& origin) {
  const Sniffed found = sniff(library.data(), library.size(), origin);
  std::vector<Bundle> bundles;
  if (found.format == Format::kStaticLibrary) {
    for (const LibraryMember& member : members_of(library, origin)) {
      const Bytes& content = member.content;
      const std::string name = "member '" + printable(member.name) + "' of " + origin;
      if (sniff(content.data(), content.size(), name).format != Format::kHostElf) continue;
      for (Bundle& bundle : embedded_bundles(content, name)) {
        for (EmbeddedFile& file : bundle) file.offset += member.offset;
        bundles.push_back(std::move(bundle));
      }
    }
    return bundles;
  }
  if (found.format != Format::kHostElf) {
    fail({"image", origin, "is no library with a package in it",
          "a shared library, object or program that torch_cubin.embed made", "", ""});
  }
  for_each_section(library, origin, [&](std::string_view name, uint64_t offset, uint64_t size) {
    if (name == kEmbeddedSection) list_bundles(library, offset, offset + size, origin, bundles);
  });
  return bundles;
}

}  // namespace torch_cubin
