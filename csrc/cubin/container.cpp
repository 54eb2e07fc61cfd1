// list_entries and unpack: dispatch on the format.
#include "cubin/container.h"

#include "cubin/arch.h"
#include "cubin/error.h"
#include "cubin/ptx.h"

namespace torch_cubin {
namespace {

Arch arch_of(Format format, const Bytes& bytes, const std::string& origin) {
  if (format == Format::kPtx) return parse_ptx(bytes.data(), bytes.size(), origin).arch;
  return read_arch(Elf(bytes.data(), bytes.size(), origin));
}

bool is_image(Format format) {
  return format == Format::kCubin || format == Format::kRelocatableCubin || format == Format::kPtx;
}

// A damaged image is listed without an arch, since others in the file may be valid.
void read_entry_arch(Entry& entry, const std::string& origin) {
  if (!is_image(entry.format)) return;
  try {
    entry.arch = arch_of(entry.format, entry.stored, origin);
  } catch (const Error&) {
    entry.arch = Arch{};
  }
}

}  // namespace

const char* compression_name(Compression compression) {
  switch (compression) {
    case Compression::kNone:
      return "none";
    case Compression::kLz4:
      return "lz4";
    case Compression::kZstd:
      return "zstd";
    case Compression::kUnknown:
      break;
  }
  return "unknown";
}

Container list_entries(const uint8_t* data, size_t size, const std::string& origin) {
  if (size > kMaxImageBytes) {
    fail({"image", origin, "is too large", "at most " + std::to_string(kMaxImageBytes) + " bytes",
          std::to_string(size) + " bytes", "Take the part that you want out of it."});
  }
  const Sniffed found = sniff(data, size, origin);
  const Bytes file(data, size);
  Container container;
  container.format = found.format;
  container.size = size;
  switch (found.format) {
    case Format::kCubin:
    case Format::kRelocatableCubin:
    case Format::kPtx: {
      Entry whole;
      whole.format = found.format;
      whole.stored = file;
      whole.size = size;
      whole.arch = arch_of(found.format, file, origin);
      container.entries.push_back(whole);
      break;
    }
    case Format::kFatbin:
      list_fatbin(file, 0, origin, container.entries);
      break;
    case Format::kHostElf:
      list_host_elf(file, origin, container);
      for (Entry& entry : container.entries) read_entry_arch(entry, origin);
      break;
    case Format::kStaticLibrary:
      list_static_library(file, origin, container);
      for (Entry& entry : container.entries) read_entry_arch(entry, origin);
      break;
    case Format::kText:
      list_arrays(file, origin, container.entries);
      for (Entry& entry : container.entries) read_entry_arch(entry, origin);
      if (container.entries.empty()) {
        fail({"image", origin,
              "is not a cubin: it is text, but neither PTX nor C source with device code in an "
              "array of bytes",
              "", "", "Pass the file that `nvcc -cubin -arch=sm_XY` writes."});
      }
      break;
    default:
      fail(found.refusal);
  }
  return container;
}

Buffer unpack(const Entry& entry, const std::string& origin) {
  switch (entry.compression) {
    case Compression::kNone:
      return Buffer(entry.stored.data(), entry.stored.data() + entry.stored.size());
    case Compression::kLz4:
      return lz4_decompress(entry.stored, static_cast<size_t>(entry.size), origin);
    case Compression::kZstd:
      return zstd_decompress(entry.stored, static_cast<size_t>(entry.size), origin);
    case Compression::kUnknown:
      break;
  }
  fail({"image", origin, "is packed by a method that this version does not know",
        "raw, LZ4 or zstd", "", "Take it out with `cuobjdump -xelf all FILE`."});
}

// Device code compresses to about a tenth; only __device__ arrays of zeros compress to much less.
Unpacker::Unpacker(size_t file_bytes) : left_((16 << 20) + uint64_t{32} * file_bytes) {}

Bytes Unpacker::open(const Entry& entry, const std::string& origin, Buffer& buffer) {
  if (entry.compression == Compression::kNone) return entry.stored;
  if (entry.size > left_) {
    fail({"image", origin, "is not unpacked: it claims to be too large for its file", "",
          std::to_string(entry.size) + " bytes", "Take it out with `cuobjdump -xelf all FILE`."});
  }
  left_ -= entry.size;
  buffer = unpack(entry, origin);
  return Bytes(buffer.data(), buffer.size());
}

}  // namespace torch_cubin
