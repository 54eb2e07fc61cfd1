// Each refusal names the format and the command that produces a cubin from it.
#include "cubin/sniff.h"

#include <cstring>
#include <string_view>

#include "cubin/elf.h"
#include "cubin/error.h"

namespace torch_cubin {
namespace {

using std::string_view_literals::operator""sv;

constexpr uint16_t kMachineAmd = 224;

struct Signature {
  std::string_view bytes;
  Format format;
  const char* what;
  const char* advice;
};

constexpr Signature kSignatures[] = {
    {"\x50\xed\x55\xba"sv, Format::kFatbin, "is a fatbin",
     "Take the cubin for your GPU out of it: `cuobjdump -xelf all FILE`, or compile with -cubin."},
    {"\xb1\x43\x62\x46"sv, Format::kOther, "is a fatbin wrapper (__fatBinC_Wrapper_t)",
     "It holds only a pointer: compile with `nvcc -cubin -arch=sm_XY`."},
    {"\xed\x43\x4e\x7f"sv, Format::kLtoIr, "is NVVM LTO-IR",
     "Link it first: `nvcc -dlto -cubin -arch=sm_XY`, or nvJitLink."},
    {"BC\xc0\xde"sv, Format::kLlvmBitcode, "is LLVM bitcode",
     "Compile it to a cubin with the compiler that wrote it."},
    {"\x7fTileIR\0"sv, Format::kTileBytecode, "is cuTile bytecode",
     "Compile it to a cubin with `tileiras`."},
    {"version https://git-lfs"sv, Format::kOther, "is a Git LFS pointer, not the file itself",
     "Fetch the file: `git lfs pull`."},
    {"!<arch>\n"sv, Format::kStaticLibrary, "is a static library",
     "If it embeds device code, take the cubin out with `cuobjdump -xelf all FILE`; otherwise "
     "compile "
     "the kernel with `nvcc -cubin -arch=sm_XY`."},
    {"!<thin>\n"sv, Format::kOther, "is a thin static library, which only names its objects",
     "Pass the objects themselves."},
    {"MZ"sv, Format::kOther, "is a Windows executable or DLL",
     "Compile the kernel with `nvcc -cubin -arch=sm_XY`."},
    {"PK\x03\x04"sv, Format::kOther, "is a zip archive", "Unpack it and pass the cubin inside."},
    {"\x1f\x8b"sv, Format::kOther, "is a gzip file", "Unpack it with `gunzip`."},
    {"\x28\xb5\x2f\xfd"sv, Format::kOther, "is a zstd file", "Unpack it with `unzstd`."},
};

bool starts_with(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

// Whether there are no control characters or NULs. Bytes above ASCII are allowed, as in comments.
bool looks_like_text(std::string_view head) {
  for (const char c : head) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte == 0x7f || (byte < 0x20 && (byte < '\t' || byte > '\r'))) return false;
  }
  return true;
}

Sniffed refused(Format format, const std::string& origin, const std::string& what,
                const std::string& advice) {
  return {format, {"image", origin, what, "a cubin", "", advice}};
}

Sniffed sniff_elf(const Bytes& file, const std::string& origin) {
  const char* compile = "Compile the kernel with `nvcc -cubin -arch=sm_XY`.";
  if (!file.contains(0, 20)) {
    return {Format::kOther,
            {"image", origin, "is too short for an ELF header", "64 bytes",
             counted(file.size(), "byte"), "Copy or build the file again."}};
  }
  if (file.u8(4) != 2)
    return refused(Format::kOther, origin, "is not a 64-bit ELF file (ELF32?)", compile);
  if (file.u8(5) != 1)
    return refused(Format::kOther, origin, "is not a little-endian ELF file", compile);
  const uint16_t type = file.u16(16), machine = file.u16(18);
  if (machine == kMachineX86 || machine == kMachineArm) {
    return refused(Format::kHostElf, origin,
                   std::string("is a host ELF file (") + machine_name(machine) +
                       " object, library or program)",
                   "If it embeds device code, take the cubin out with `cuobjdump -xelf all FILE`; "
                   "otherwise compile the kernel with `nvcc -cubin -arch=sm_XY`.");
  }
  if (machine == kMachineAmd)
    return refused(Format::kAmdCode, origin, "is code for an AMD GPU (hsaco)", compile);
  if (machine != kMachineCuda) {
    return refused(Format::kOther, origin,
                   "is an ELF file for machine " + std::to_string(machine) + ", not CUDA's 190",
                   compile);
  }
  if (type != kElfExecutable && type != kElfRelocatable) {
    return refused(Format::kOther, origin,
                   "is a CUDA ELF file of type " + std::to_string(type) + ", not 2 (loadable)",
                   compile);
  }
  const unsigned os_abi = file.u8(7), version = file.u8(8);
  if (!(os_abi == 0x33 && version == 7) && !(os_abi == 0x41 && version == 8)) {
    return {
        Format::kOther,
        {"image", origin, "has an unknown layout", "OS ABI 51 version 7, or OS ABI 65 version 8",
         "OS ABI " + std::to_string(os_abi) + " version " + std::to_string(version),
         "A newer torch_cubin may read it; or build it with CUDA 11.8 to 13."}};
  }
  if (type == kElfRelocatable) {
    return refused(
        Format::kRelocatableCubin, origin, "is a relocatable device object (nvcc -dc or -rdc=true)",
        "Link it first: `nvlink -arch=sm_XY FILE -o linked.cubin`, or compile without -rdc.");
  }
  return {Format::kCubin, {}};
}

}  // namespace

const char* format_name(Format format) {
  switch (format) {
    case Format::kCubin:
      return "cubin";
    case Format::kRelocatableCubin:
      return "relocatable_cubin";
    case Format::kPtx:
      return "ptx";
    case Format::kFatbin:
      return "fatbin";
    case Format::kHostElf:
      return "host_elf";
    case Format::kStaticLibrary:
      return "static_library";
    case Format::kText:
      return "c_source";
    case Format::kLtoIr:
      return "lto_ir";
    case Format::kLlvmBitcode:
      return "llvm_bitcode";
    case Format::kTileBytecode:
      return "cutile_bytecode";
    case Format::kAmdCode:
      return "amd_code_object";
    case Format::kOther:
      break;
  }
  return "unknown";
}

// Skips blanks and C comments, which may precede PTX's `.version`.
std::string_view skip_comments(std::string_view text) {
  while (!text.empty()) {
    const size_t blank = text.find_first_not_of(" \t\r\n");
    if (blank == std::string_view::npos) return {};
    text.remove_prefix(blank);
    std::string_view end;
    if (starts_with(text, "//")) {
      end = "\n";
    } else if (starts_with(text, "/*")) {
      end = "*/";
    } else {
      return text;
    }
    const size_t stop = text.find(end, 2);
    if (stop == std::string_view::npos) return {};
    text.remove_prefix(stop + end.size());
  }
  return text;
}

Sniffed sniff(const uint8_t* data, size_t size, const std::string& origin) {
  if (size == 0) {
    return {Format::kOther,
            {"image", origin, "is empty", "a cubin", "0 bytes", "Copy or build the file again."}};
  }
  const Bytes head(data, size < kSniffBytes ? size : kSniffBytes);
  if (starts_with(head.text(),
                  "\x7f"
                  "ELF"))
    return sniff_elf(head, origin);
  for (const Signature& signature : kSignatures) {
    if (starts_with(head.text(), signature.bytes)) {
      return refused(signature.format, origin, signature.what, signature.advice);
    }
  }
  if (starts_with(skip_comments(head.text()), ".version")) {
    return refused(
        Format::kPtx, origin, "is PTX text",
        "PTX is never compiled behind your back: run `ptxas -arch=sm_XY FILE -o FILE.cubin`.");
  }
  const Format text = looks_like_text(head.text()) ? Format::kText : Format::kOther;
  if (head.text().find("unsigned char ") != std::string_view::npos &&
      head.text().find("0x7f") != std::string_view::npos) {
    return refused(text, origin, "is C source with the bytes as a hex array",
                   "Write the array's bytes into a file and pass that.");
  }
  return refused(text, origin, "is not a cubin: it does not begin with an ELF header",
                 "Pass the file that `nvcc -cubin -arch=sm_XY` writes.");
}

void require_cubin(const uint8_t* data, size_t size, const std::string& origin) {
  const Sniffed found = sniff(data, size, origin);
  if (found.format != Format::kCubin) fail(found.refusal);
}

}  // namespace torch_cubin
