// Container: what lies in a file that may hold device code, one level at a time.
//
//   Container file = list_entries(data, size, "file 'x.so'");        // a host ELF: its fatbins
//   Buffer fatbin = unpack(file.entries[0], "...");                   // a fatbin: list_entries again
//
// Every offset, size and count is checked; nothing is unpacked until unpack(). Includes neither
// torch nor cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cubin/decompress.h"
#include "cubin/elf.h"
#include "cubin/image.h"
#include "cubin/sniff.h"

namespace torch_cubin {

constexpr uint32_t kFatbinMagic = 0xba55ed50;
constexpr size_t kMaxEntries = 100000;  // of one container

enum class Compression { kNone, kLz4, kZstd, kUnknown };

const char* compression_name(Compression compression);  // "none", "lz4", "zstd", "unknown"

struct Entry {
  // Of an entry that is packed: what the container says. A fatbin does not tell a relocatable cubin
  // from a loadable one, so kCubin may turn out to be kRelocatableCubin.
  Format format = Format::kOther;
  std::string name;     // section, array, embedded file, or what fatbinary's -ident said; or empty
  Arch arch;            // of a fatbin's entry: what its header says; sm is 0 where it is not known
  uint64_t offset = 0;  // in the container
  Bytes stored;         // where they lie in the container, or in `owned`
  Compression compression = Compression::kNone;
  uint64_t size = 0;                    // unpacked, in bytes
  uint32_t kind = 0;                    // fatbin: the number that stands for the format
  uint64_t flags = 0;                   // fatbin
  std::string options;                  // fatbin: the compiler's options, where it left them
  std::shared_ptr<const Buffer> owned;  // the bytes of an array in C source
  // A symbol of a host file's data names it: it may be any array that begins as an image does.
  bool is_guess = false;
  bool is_file = false;     // a file that torch_cubin.embed put there
  bool in_package = false;  // an embedded file that stands beside a manifest.json
};

struct Container {
  Format format = Format::kOther;
  size_t size = 0;
  std::string machine;  // of a host ELF: "x86-64"
  std::vector<Entry> entries;
};

// The entries of a fatbin, of a host ELF (its fatbins, what torch_cubin.embed put there, then
// images in its data that symbols name), of a static library (those of its objects) or of C source
// (its arrays); for a cubin or PTX one entry that is all of it. The bytes must outlive the result.
// Throws [image] for a damaged container and for anything else, saying what it is.
Container list_entries(const uint8_t* data, size_t size, const std::string& origin);

// The entry's own bytes, decompressed. Throws [image] where they are damaged or cannot be unpacked.
Buffer unpack(const Entry& entry, const std::string& origin);

// Opens the entries of one file, however deep, and bounds what they are unpacked to: a small file
// may hold compressed data of endless size.
class Unpacker {
 public:
  explicit Unpacker(size_t file_bytes);
  // The entry's own bytes, in `buffer` where they were compressed. Throws [image].
  Bytes open(const Entry& entry, const std::string& origin, Buffer& buffer);

 private:
  uint64_t left_;
};

// The parts of list_entries, a format each. They add to `entries`; offsets count from `file`.
void list_fatbin(const Bytes& file, uint64_t offset, const std::string& origin,
                 std::vector<Entry>& entries);
void list_host_elf(const Bytes& file, const std::string& origin, Container& container);
// The same, and no error where there are none.
void list_host_elf_entries(const Bytes& file, const std::string& origin, Container& container);
void list_static_library(const Bytes& file, const std::string& origin, Container& container);
// Adds what symbols of its data name; the file's header and section headers have been checked.
void list_symbol_images(const Bytes& file, const std::string& origin, std::vector<Entry>& entries);
void list_arrays(const Bytes& file, const std::string& origin, std::vector<Entry>& entries);

struct LibraryMember {
  std::string name;
  uint64_t offset = 0;  // in the library
  Bytes content;
};
// The members of a static library, but for its tables. Throws [image] for a damaged one.
std::vector<LibraryMember> members_of(const Bytes& library, const std::string& origin);

// A fatbin's whole length, its header included; throws [image] where it is none or is cut short.
uint64_t fatbin_bytes(const Bytes& file, uint64_t offset, const std::string& origin);

}  // namespace torch_cubin
