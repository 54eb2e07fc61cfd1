// list_static_library: the objects of a static library (`ar`), each with its device code.
//
// Layout: "!<arch>\n", then members at even offsets, each a header of 60 characters (name, date,
// owner, mode, size, "`\n") and its bytes. GNU ar stores long names in a member "//" and refers to
// them by "/OFFSET"; BSD ar writes "#1/LENGTH" and begins the member with its name. Other members
// whose names begin with "/", and "__.SYMDEF", are symbol tables.
#include "cubin/container.h"
#include "cubin/error.h"

namespace torch_cubin {
namespace {

constexpr uint64_t kMemberHeaderBytes = 60;
constexpr std::string_view kStart = "!<arch>\n";
constexpr int kMostNested = 8;  // libraries in libraries

[[noreturn]] void damaged_library(const std::string& origin, uint64_t offset,
                                  const std::string& problem) {
  fail({"image", origin,
        "is a damaged static library: its member at offset " + std::to_string(offset) + " " +
            problem,
        "", "", "Build or copy it again."});
}

std::string_view without_end(std::string_view text, char end) {
  const size_t last = text.find_last_not_of(end);
  return text.substr(0, last == std::string_view::npos ? 0 : last + 1);
}

// Parses digits followed by blanks. Returns false for anything else.
bool read_decimal(std::string_view text, uint64_t* value) {
  text = without_end(text, ' ');
  *value = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return false;
    *value = *value * 10 + static_cast<uint64_t>(c - '0');
  }
  return !text.empty();
}

}  // namespace

std::vector<LibraryMember> members_of(const Bytes& library, const std::string& origin) {
  std::vector<LibraryMember> members;
  std::string_view long_names;
  for (uint64_t at = kStart.size(); at < library.size();) {
    if (members.size() == kMaxEntries) damaged_library(origin, at, "is one too many");
    if (!library.contains(at, kMemberHeaderBytes)) damaged_library(origin, at, "is cut short");
    const std::string_view header =
        library.text().substr(static_cast<size_t>(at), kMemberHeaderBytes);
    uint64_t size = 0;
    if (header.substr(58) != "`\n" || !read_decimal(header.substr(48, 10), &size)) {
      damaged_library(origin, at, "has no header");
    }
    const uint64_t start = at + kMemberHeaderBytes;
    if (!library.contains(start, size))
      damaged_library(origin, at, "ends past the end of the file");
    Bytes content(library.data() + start, static_cast<size_t>(size));
    std::string_view name = without_end(header.substr(0, 16), ' ');
    uint64_t number = 0;
    bool is_table = name == "/" || name == "/SYM64/" || name.substr(0, 9) == "__.SYMDEF";
    if (name == "//") {
      long_names = content.text();
      is_table = true;
    } else if (name.substr(0, 1) == "/" && read_decimal(name.substr(1), &number)) {
      if (number >= long_names.size()) damaged_library(origin, at, "has a name outside its table");
      name = long_names.substr(static_cast<size_t>(number), kMaxNameBytes);
      name = name.substr(0, name.find('\n'));
    } else if (name.substr(0, 3) == "#1/" && read_decimal(name.substr(3), &number)) {
      if (number > size) damaged_library(origin, at, "is shorter than its name");
      name = without_end(content.text().substr(0, static_cast<size_t>(number)), '\0');
      content = Bytes(content.data() + number, static_cast<size_t>(size - number));
      is_table = name.substr(0, 9) == "__.SYMDEF";
    }
    if (!is_table) {
      members.push_back({std::string(without_end(name, '/')),
                         static_cast<uint64_t>(content.data() - library.data()), content});
    }
    at = start + size + (size & 1);
  }
  return members;
}

namespace {

void list_members(const Bytes& library, const std::string& origin, int depth,
                  Container& container) {
  for (const LibraryMember& member : members_of(library, origin)) {
    const std::string name = "member '" + printable(member.name) + "' of " + origin;
    const Format format = sniff(member.content.data(), member.content.size(), name).format;
    Container found;
    if (format == Format::kHostElf) {
      list_host_elf_entries(member.content, name, found);
    } else if (format == Format::kCubin || format == Format::kRelocatableCubin ||
               format == Format::kFatbin || format == Format::kPtx) {
      Entry whole;
      whole.format = format;
      whole.stored = member.content;
      whole.size = member.content.size();
      found.entries.push_back(std::move(whole));
    } else if (format == Format::kStaticLibrary) {
      if (depth == kMostNested) damaged_library(origin, member.offset, "is nested too deeply");
      list_members(member.content, name, depth + 1, found);
    }
    if (container.machine.empty()) container.machine = found.machine;
    if (found.entries.size() > kMaxEntries - container.entries.size()) {
      damaged_library(origin, member.offset, "has too many fatbins");
    }
    for (Entry& entry : found.entries) {
      entry.offset += member.offset;
      entry.name = member.name + (entry.name.empty() ? "" : ": " + entry.name);
      container.entries.push_back(std::move(entry));
    }
  }
}

}  // namespace

void list_static_library(const Bytes& file, const std::string& origin, Container& container) {
  list_members(file, origin, 0, container);
  if (container.entries.empty()) {
    fail({"image", origin, "is a static library without device code in it",
          "an object with a section .nv_fatbin, __nv_relfatbin or .torch_cubin", "",
          "Compile the kernel with `nvcc -cubin -arch=sm_XY`."});
  }
}

}  // namespace torch_cubin
