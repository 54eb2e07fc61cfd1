// Container: the contents of a file with device code, one level at a time.
//
//   Container file = list_entries(data, size, "file 'x.so'");  // a host ELF: its fatbins
//   Buffer fatbin = unpack(file.entries[0], "...");            // a fatbin: list_entries again
//
// Every offset, size and count is checked. Only unpack() decompresses. Includes neither torch nor
// cuda.h.
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
  // For a compressed entry: the container's statement. A fatbin does not distinguish relocatable
  // cubins from loadable ones, so kCubin may be a kRelocatableCubin.
  Format format = Format::kOther;
  std::string name;     // section, array, embedded file, or fatbinary's -ident; or empty
  Arch arch;            // for a fatbin's entry, from its header; sm is 0 if unknown
  uint64_t offset = 0;  // in the container
  Bytes stored;         // the bytes in the container, or in `owned`
  Compression compression = Compression::kNone;
  uint64_t size = 0;                    // unpacked, in bytes
  uint32_t kind = 0;                    // fatbin: the format's number
  uint64_t flags = 0;                   // fatbin
  std::string options;                  // fatbin: the compiler's options, if recorded
  std::shared_ptr<const Buffer> owned;  // the bytes of an array in C source
  // Found by a symbol of a host file's data: may be any array that begins like an image.
  bool is_guess = false;
  bool is_file = false;     // a file embedded by torch_cubin.embed
  bool in_package = false;  // an embedded file next to a manifest.json
};

struct Container {
  Format format = Format::kOther;
  size_t size = 0;
  std::string machine;  // of a host ELF: "x86-64"
  std::vector<Entry> entries;
};

// The entries of a fatbin, of a host ELF (fatbins, files embedded by torch_cubin.embed, then images
// in its data that symbols name), of a static library (those of its objects) or of C source (its
// arrays); for a cubin or PTX a single entry. The bytes must outlive the result. Throws [image] for
// a damaged container and for any other format, which it names.
Container list_entries(const uint8_t* data, size_t size, const std::string& origin);

// The entry's bytes, decompressed. Throws [image] if they are damaged or cannot be unpacked.
Buffer unpack(const Entry& entry, const std::string& origin);

// Opens the entries of one file at any depth and limits their total unpacked size, since a small
// file may contain compressed data of unlimited size.
class Unpacker {
 public:
  explicit Unpacker(size_t file_bytes);
  // The entry's bytes, in `buffer` if they were compressed. Throws [image].
  Bytes open(const Entry& entry, const std::string& origin, Buffer& buffer);

 private:
  uint64_t left_;
};

// The parts of list_entries, one per format. They append to `entries`; offsets are relative to
// `file`.
void list_fatbin(const Bytes& file, uint64_t offset, const std::string& origin,
                 std::vector<Entry>& entries);
void list_host_elf(const Bytes& file, const std::string& origin, Container& container);
// The same, without an error if there are none.
void list_host_elf_entries(const Bytes& file, const std::string& origin, Container& container);
void list_static_library(const Bytes& file, const std::string& origin, Container& container);
// Adds the images that symbols of the file's data name. The file's header and section headers must
// have been checked.
void list_symbol_images(const Bytes& file, const std::string& origin, std::vector<Entry>& entries);
void list_arrays(const Bytes& file, const std::string& origin, std::vector<Entry>& entries);

struct LibraryMember {
  std::string name;
  uint64_t offset = 0;  // in the library
  Bytes content;
};
// The members of a static library without its tables. Throws [image] for a damaged library.
std::vector<LibraryMember> members_of(const Bytes& library, const std::string& origin);

// A fatbin's length including its header. Throws [image] if it is not a fatbin or truncated.
uint64_t fatbin_bytes(const Bytes& file, uint64_t offset, const std::string& origin);

}  // namespace torch_cubin
