// Bundles: the files that torch_cubin.embed puts into a host library's section `.torch_cubin`.
//
//   offset  bytes
//        0      8  "TCBUNDLE"
//        8      8  bytes of the whole bundle
//       16      8  number of files, n
//       24   64*n  of each file: name's offset and bytes, content's offset and bytes (8 each, from
//                  the bundle's first byte), the content's sha256
//                  then names and contents, in the order of the table, without overlap
//
// A linker concatenates the bundles of several objects, with zeros between. They are read from the
// file, without running the library. Includes neither torch nor cuda.h.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cubin/elf.h"

namespace torch_cubin {

struct EmbeddedFile {
  std::string name;     // relative, as in a package's manifest; unique in a bundle
  uint64_t offset = 0;  // in the library
  Bytes bytes;          // verified by the table's sha256
};

constexpr std::string_view kBundleMagic = "TCBUNDLE";

using Bundle = std::vector<EmbeddedFile>;

// Whether the bundle is a package, that is, has a manifest.json.
bool is_package(const Bundle& bundle);

constexpr std::string_view kEmbeddedSection = ".torch_cubin";

// Adds the bundles in the bytes [begin, end) of `library`. Throws [image] for an inconsistent table
// and [hash] for contents that do not match their sha256.
void list_bundles(const Bytes& library, uint64_t begin, uint64_t end, const std::string& origin,
                  std::vector<Bundle>& bundles);

// The bundles of an object, library or program; empty if it has no such section. Throws like
// list_bundles, and [image] for a file that is not a host ELF.
std::vector<Bundle> embedded_bundles(const Bytes& library, const std::string& origin);

}  // namespace torch_cubin
