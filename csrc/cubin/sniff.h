// Tells what kind of file some bytes are, by their first bytes, and what to do with each.
//
// Includes neither torch nor cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "cubin/error.h"

namespace torch_cubin {

enum class Format {
  kCubin,             // loadable
  kRelocatableCubin,  // nvcc -dc: must be linked first
  kPtx,
  kFatbin,
  kHostElf,        // x86-64 or aarch64: may embed fatbins
  kStaticLibrary,  // ar: its objects may
  kText,           // may be C source with the bytes as an array
  kLtoIr,
  kLlvmBitcode,
  kTileBytecode,
  kAmdCode,
  kOther,
};

// "cubin", "relocatable_cubin", ...: the `kind` of inspect()'s JSON.
const char* format_name(Format format);

// PTX may begin with comments, so this much is looked at.
constexpr size_t kSniffBytes = 4096;

struct Sniffed {
  Format format = Format::kOther;
  Fault refusal;  // why these bytes are no loadable cubin; nothing for kCubin
};

// Never throws. `origin` becomes the refusal's object.
Sniffed sniff(const uint8_t* data, size_t size, const std::string& origin);

// Returns if the bytes begin as a loadable cubin does; otherwise throws [image] with what they are
// and what to do with such a file.
void require_cubin(const uint8_t* data, size_t size, const std::string& origin);

// `text` behind its blanks and C comments, which may stand before PTX's `.version`.
std::string_view skip_comments(std::string_view text);

}  // namespace torch_cubin
