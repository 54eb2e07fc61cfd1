// Detects a file's format from its first bytes, with advice for each unsupported one.
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
  kRelocatableCubin,  // from nvcc -dc; must be linked first
  kPtx,
  kFatbin,
  kHostElf,        // x86-64 or aarch64; may embed fatbins
  kStaticLibrary,  // ar; its objects may embed fatbins
  kText,           // may be C source with device code as arrays
  kLtoIr,
  kLlvmBitcode,
  kTileBytecode,
  kAmdCode,
  kOther,
};

// "cubin", "relocatable_cubin", ...: the `kind` of inspect()'s JSON.
const char* format_name(Format format);

// PTX may begin with comments, so this many bytes are read.
constexpr size_t kSniffBytes = 4096;

struct Sniffed {
  Format format = Format::kOther;
  Fault refusal;  // the error if they are not a loadable cubin; empty for kCubin
};

// Never throws. `origin` becomes the refusal's object.
Sniffed sniff(const uint8_t* data, size_t size, const std::string& origin);

// Throws [image], with the format and advice, unless the bytes begin like a loadable cubin.
void require_cubin(const uint8_t* data, size_t size, const std::string& origin);

// `text` without leading blanks and C comments, which may precede PTX's `.version`.
std::string_view skip_comments(std::string_view text);

}  // namespace torch_cubin
