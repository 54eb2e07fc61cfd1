// Each refusal names what the bytes are and the command that makes a cubin of them.
#include "cubin/sniff.h"

#include <cstring>
#include <string_view>

#include "cubin/elf.h"
#include "cubin/error.h"

namespace torch_cubin {
namespace {

using std::string_view_literals::operator""sv;

constexpr size_t kSniffBytes = 4096;  // comments may come before a PTX file's first directive

struct Signature {
  std::string_view bytes;
  const char* what;
  const char* advice;
};

constexpr Signature kSignatures[] = {
    {"\x50\xed\x55\xba"sv, "is a fatbin",
     "Take the cubin for your GPU out of it: `cuobjdump -xelf all FILE`, or compile with -cubin."},
    {"\xb1\x43\x62\x46"sv, "is a fatbin wrapper (__fatBinC_Wrapper_t)",
     "It holds only a pointer: compile with `nvcc -cubin -arch=sm_XY`."},
    {"\xed\x43\x4e\x7f"sv, "is NVVM LTO-IR",
     "Link it first: `nvcc -dlto -cubin -arch=sm_XY`, or nvJitLink."},
    {"BC\xc0\xde"sv, "is LLVM bitcode", "Compile it to a cubin with the compiler that wrote it."},
    {"\x7fTileIR\0"sv, "is cuTile bytecode", "Compile it to a cubin with `tileiras`."},
    {"version https://git-lfs"sv, "is a Git LFS pointer, not the file itself",
     "Fetch the file: `git lfs pull`."},
    {"!<arch>\n"sv, "is a static library", "Compile the kernel with `nvcc -cubin -arch=sm_XY`."},
    {"MZ"sv, "is a Windows executable or DLL",
     "Compile the kernel with `nvcc -cubin -arch=sm_XY`."},
    {"PK\x03\x04"sv, "is a zip archive", "Unpack it and pass the cubin inside."},
    {"\x1f\x8b"sv, "is a gzip file", "Unpack it with `gunzip`."},
    {"\x28\xb5\x2f\xfd"sv, "is a zstd file", "Unpack it with `unzstd`."},
};

bool starts_with(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

// The text behind blanks and C comments, which may precede PTX's `.version`.
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

[[noreturn]] void refuse(const std::string& origin, const std::string& what,
                         const std::string& advice) {
  fail({"image", origin, what, "a cubin", "", advice});
}

void require_cubin_elf(const Bytes& file, const std::string& origin) {
  const char* compile = "Compile the kernel with `nvcc -cubin -arch=sm_XY`.";
  if (!file.contains(0, 20)) {
    fail({"image", origin, "is too short for an ELF header", "64 bytes",
          std::to_string(file.size()) + " bytes", "Copy or build the file again."});
  }
  if (file.u8(4) != 2) refuse(origin, "is not a 64-bit ELF file (ELF32?)", compile);
  if (file.u8(5) != 1) refuse(origin, "is not a little-endian ELF file", compile);
  const uint16_t type = file.u16(16), machine = file.u16(18);
  if (machine == 62 || machine == 183) {
    refuse(origin,
           std::string("is a host ELF file (") + (machine == 62 ? "x86-64" : "aarch64") +
               " object, library or program)",
           "If it embeds device code, take the cubin out with `cuobjdump -xelf all FILE`; "
           "otherwise compile the kernel with `nvcc -cubin -arch=sm_XY`.");
  }
  if (machine == 224) refuse(origin, "is code for an AMD GPU (hsaco)", compile);
  if (machine != kMachineCuda) {
    refuse(origin, "is an ELF file for machine " + std::to_string(machine) + ", not CUDA's 190",
           compile);
  }
  if (type == kElfRelocatable) {
    refuse(origin, "is a relocatable device object (nvcc -dc or -rdc=true)",
           "Link it first: `nvlink -arch=sm_XY FILE -o linked.cubin`, or compile without -rdc.");
  }
  if (type != kElfExecutable) {
    refuse(origin, "is a CUDA ELF file of type " + std::to_string(type) + ", not 2 (loadable)",
           compile);
  }
  const unsigned os_abi = file.u8(7);
  if (!file.contains(0, 9)) return;
  const unsigned version = file.u8(8);
  if (!(os_abi == 0x33 && version == 7) && !(os_abi == 0x41 && version == 8)) {
    fail({"image", origin, "has an unknown layout", "OS ABI 51 version 7, or OS ABI 65 version 8",
          "OS ABI " + std::to_string(os_abi) + " version " + std::to_string(version),
          "A newer torch_cubin may read it; or build it with CUDA 11.8 to 13."});
  }
}

}  // namespace

void require_cubin(const uint8_t* data, size_t size, const std::string& origin) {
  if (size == 0) {
    fail({"image", origin, "is empty", "a cubin", "0 bytes", "Copy or build the file again."});
  }
  const Bytes head(data, size < kSniffBytes ? size : kSniffBytes);
  if (starts_with(head.text(),
                  "\x7f"
                  "ELF"))
    return require_cubin_elf(head, origin);
  for (const Signature& signature : kSignatures) {
    if (starts_with(head.text(), signature.bytes)) {
      refuse(origin, signature.what, signature.advice);
    }
  }
  if (starts_with(skip_comments(head.text()), ".version")) {
    refuse(origin, "is PTX text",
           "PTX is never compiled behind your back: run `ptxas -arch=sm_XY FILE -o FILE.cubin`.");
  }
  if (head.text().find("unsigned char ") != std::string_view::npos &&
      head.text().find("0x7f") != std::string_view::npos) {
    refuse(origin, "is C source with the bytes as a hex array",
           "Write the array's bytes into a file and pass that.");
  }
  refuse(origin, "is not a cubin: it does not begin with an ELF header",
         "Pass the file that `nvcc -cubin -arch=sm_XY` writes.");
}

}  // namespace torch_cubin
