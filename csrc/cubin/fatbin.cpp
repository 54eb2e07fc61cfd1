// list_fatbin: the entries of NVIDIA's fat binary, as written by fatbinary of CUDA 11.8 to 13.0.
//
// Layout (found by packing known images in every mode): a header of 16 bytes (magic, version, own
// size, size of the rest), then consecutive entries, each a header and a payload padded to 8 bytes.
#include "cubin/container.h"
#include "cubin/error.h"

namespace torch_cubin {
namespace {

constexpr uint64_t kFatbinHeaderBytes = 16;
constexpr uint64_t kEntryHeaderBytes = 64;
constexpr uint32_t kKindPtx = 1;
constexpr uint32_t kKindCubin = 2;
constexpr uint32_t kKindLtoIr = 8;
constexpr uint64_t kFlagLz4 = 0x2000;
constexpr uint64_t kFlagZstd = 0x8000;
constexpr uint64_t kFlagArchSpecific = 0x100000;  // sm_90a
constexpr uint64_t kFlagFamily = 0x200000;        // sm_100f

[[noreturn]] void damaged_fatbin(const std::string& origin, const std::string& problem) {
  fail({"image", origin, "is a damaged fatbin: " + problem, "", "",
        "Build or copy the file again."});
}

std::string at_offset(uint64_t offset) { return " at offset " + std::to_string(offset); }

Format format_of(uint32_t kind, const Bytes& stored, bool packed) {
  if (kind == kKindPtx) return Format::kPtx;
  if (kind == kKindLtoIr) return Format::kLtoIr;
  if (kind != kKindCubin) return Format::kOther;
  const bool relocatable =
      !packed && sniff(stored.data(), stored.size(), "").format == Format::kRelocatableCubin;
  return relocatable ? Format::kRelocatableCubin : Format::kCubin;
}

// Text after the fixed part of an entry's header; empty if it is not text.
std::string header_text(const Bytes& header, uint64_t offset, uint64_t length) {
  if (length == 0 || !header.contains(offset, length)) return "";
  std::string text(reinterpret_cast<const char*>(header.data() + offset),
                   static_cast<size_t>(length));
  const size_t end = text.find_last_not_of(std::string(" \0", 2));
  text.resize(end == std::string::npos ? 0 : end + 1);
  for (const char c : text) {
    if (c < ' ' || c > '~') return "";  // NOTE: for sm_100 and later it may be binary attributes
  }
  return text;
}

Entry read_entry(const Bytes& file, uint64_t offset, uint64_t end, const std::string& origin) {
  const auto require = [&](bool holds, const char* problem) {
    if (!holds) damaged_fatbin(origin, "the entry" + at_offset(offset) + " " + problem);
  };
  require(kEntryHeaderBytes <= end - offset, "is cut short");
  const Bytes fixed(file.data() + offset, kEntryHeaderBytes);
  const uint64_t header_bytes = fixed.u32(4), padded = fixed.u64(8);
  require(header_bytes >= kEntryHeaderBytes && header_bytes <= end - offset,
          "has a header that ends outside");
  require(padded <= end - offset - header_bytes, "ends past the end of the fatbin");
  const Bytes header(file.data() + offset, static_cast<size_t>(header_bytes));
  const uint64_t compressed = fixed.u32(16), options = fixed.u32(20);

  Entry entry;
  entry.kind = fixed.u16(0);
  entry.arch.sm = static_cast<int>(fixed.u32(28) & 0xffff);
  entry.flags = fixed.u64(40);
  if ((entry.flags & kFlagArchSpecific) != 0) entry.arch.suffix = 'a';
  if ((entry.flags & kFlagFamily) != 0) entry.arch.suffix = 'f';
  entry.name = header_text(header, fixed.u32(32), fixed.u32(36));
  if (header.contains(options, 8)) {  // offset and length of the options
    const uint64_t start = header.u32(options), length = header.u32(options + 4);
    if (options != 0) entry.options = header_text(header, start, length);
  }
  entry.offset = offset + header_bytes;
  const bool packed = compressed != 0;
  if (packed) {
    require(compressed <= padded, "holds more than its size");
    entry.compression = (entry.flags & kFlagZstd) != 0  ? Compression::kZstd
                        : (entry.flags & kFlagLz4) != 0 ? Compression::kLz4
                                                        : Compression::kUnknown;
    entry.size = fixed.u64(56);
    require(entry.size <= kMaxImageBytes, "claims more than a cubin may have");
  } else {
    entry.size = padded;
  }
  entry.stored =
      Bytes(file.data() + entry.offset, static_cast<size_t>(packed ? compressed : padded));
  entry.format = format_of(entry.kind, entry.stored, packed);
  // NOTE: LTO-IR in a fatbin is scrambled below its compression and cannot be unpacked.
  if (entry.format == Format::kLtoIr && packed) entry.compression = Compression::kUnknown;
  return entry;
}

}  // namespace

uint64_t fatbin_bytes(const Bytes& file, uint64_t offset, const std::string& origin) {
  if (!file.contains(offset, kFatbinHeaderBytes))
    damaged_fatbin(origin, "it is too short for a header");
  if (file.u32(offset) != kFatbinMagic) {
    damaged_fatbin(origin, "there is no fatbin" + at_offset(offset));
  }
  const uint64_t version = file.u16(offset + 4), header = file.u16(offset + 6);
  if (version != 1) {
    fail({"image", origin, "is a fatbin of another version", "1", std::to_string(version),
          "A newer torch_cubin may read it."});
  }
  if (header < kFatbinHeaderBytes || !file.contains(offset, header) ||
      !file.contains(offset + header, file.u64(offset + 8))) {
    damaged_fatbin(origin, "it ends past the end of the file");
  }
  return header + file.u64(offset + 8);
}

void list_fatbin(const Bytes& file, uint64_t offset, const std::string& origin,
                 std::vector<Entry>& entries) {
  const uint64_t end = offset + fatbin_bytes(file, offset, origin);
  uint64_t at = offset + file.u16(offset + 6);
  while (at < end) {
    if (entries.size() == kMaxEntries) {
      damaged_fatbin(origin, "it has more than " + std::to_string(kMaxEntries) + " entries");
    }
    entries.push_back(read_entry(file, at, end, origin));
    const uint64_t padded = file.u64(at + 8);
    at = entries.back().offset + padded;
  }
  // A second fatbin in the file would be ignored silently.
  for (; at < file.size(); ++at) {
    if (file.u8(at) != 0) damaged_fatbin(origin, "there are bytes after its end" + at_offset(at));
  }
}

}  // namespace torch_cubin
