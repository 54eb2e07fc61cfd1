#include "cubin/extent.h"

#include <algorithm>
#include <cstring>

#include "cubin/container.h"
#include "cubin/elf.h"
#include "cubin/embedded.h"
#include "cubin/error.h"
#include "cubin/sniff.h"

namespace torch_cubin {
namespace {

constexpr std::string_view kFatbinStart = "\x50\xed\x55\xba";
constexpr size_t kElfHeaderBytes = 64;
constexpr uint64_t kSegmentHeaderBytes = 56;
constexpr uint64_t kMaxPaddingBytes = 63;

[[noreturn]] void fail_extent(const std::string& origin, const std::string& what, size_t limit) {
  fail({"image", origin, "reaches beyond the memory that it lies in",
        "at most " + std::to_string(limit) + " bytes from its start", what,
        "Give its size, or the pointer to its first byte."});
}

// The end of the last byte that the tables refer to. If a part ends outside of the file, sets
// `outside` to its name and returns 0.
uint64_t elf_extent(const Bytes& file, const char** outside) {
  const uint64_t segments = file.u64(32), sections = file.u64(40);
  const uint64_t segment_count = file.u16(56), section_count = file.u16(60);
  uint64_t end = kElfHeaderBytes;
  const auto covers = [&](uint64_t offset, uint64_t bytes, const char* what) {
    if (!file.contains(offset, bytes)) {
      *outside = what;
      return false;
    }
    end = std::max(end, offset + bytes);
    return true;
  };
  if (segment_count != 0) {
    if (!covers(segments, segment_count * kSegmentHeaderBytes, "its segment table")) return 0;
    for (uint64_t i = 0; i < segment_count; ++i) {
      const uint64_t at = segments + i * kSegmentHeaderBytes;
      if (!covers(file.u64(at + 8), file.u64(at + 32), "one of its segments")) return 0;
    }
  }
  if (!covers(sections, section_count * kSectionHeaderBytes, "its section table")) return 0;
  for (uint64_t i = 0; i < section_count; ++i) {
    const uint64_t at = sections + i * kSectionHeaderBytes;
    const uint32_t type = file.u32(at + 4);
    if (type == 0 || type == kSectionNoBits) continue;
    if (!covers(file.u64(at + 24), file.u64(at + 32), "one of its sections")) return 0;
  }
  return end;
}

// Reads no further than the first differing byte, since the memory may be only a few bytes long.
bool begins_with(const uint8_t* data, size_t size, std::string_view start) {
  for (size_t i = 0; i < start.size(); ++i) {
    if (i >= size || data[i] != static_cast<uint8_t>(start[i])) return false;
  }
  return true;
}

bool is_elf(const uint8_t* data, size_t size) {
  return size >= kElfHeaderBytes && begins_with(data, size, "\x7f\x45LF\x02");
}

}  // namespace

size_t extent_of(const uint8_t* data, size_t limit, const std::string& origin) {
  const Bytes file(data, limit);
  if (is_elf(data, limit)) {
    const char* outside = nullptr;
    const uint64_t end = elf_extent(file, &outside);
    if (outside != nullptr) fail_extent(origin, outside, limit);
    return static_cast<size_t>(end);
  }
  if (limit >= 16 && begins_with(data, limit, kBundleMagic)) {
    const uint64_t size = file.u64(8);
    if (size > limit) fail_extent(origin, std::to_string(size) + " bytes", limit);
    return static_cast<size_t>(size);
  }
  if (begins_with(data, limit, kFatbinStart)) {
    return static_cast<size_t>(fatbin_bytes(file, 0, origin));
  }
  if (limit > 0) {
    // Text must end with a NUL.
    const void* end = std::memchr(data, 0, limit);
    if (end == nullptr) fail_extent(origin, "text without a NUL at its end", limit);
    const auto size = static_cast<size_t>(static_cast<const uint8_t*>(end) - data);
    const Format format = sniff(data, std::min(size, kSniffBytes), origin).format;
    if (format == Format::kPtx || format == Format::kText) return size;
  }
  fail({"image", origin, "does not say how long it is", "a cubin, a fatbin, PTX or a bundle",
        "bytes of another kind", "Give its size."});
}

uint64_t table_bytes_of(const uint8_t* data, size_t limit) {
  if (!is_elf(data, limit)) return 0;
  const Bytes file(data, limit);
  const uint64_t segments = kSegmentHeaderBytes * file.u16(56);
  const uint64_t sections = kSectionHeaderBytes * file.u16(60);
  return (file.contains(file.u64(32), segments) ? segments : 0) +
         (file.contains(file.u64(40), sections) ? sections : 0);
}

size_t without_padding(const uint8_t* data, size_t size) {
  if (!is_elf(data, size)) return size;
  const char* outside = nullptr;
  const uint64_t end = elf_extent(Bytes(data, size), &outside);
  // The parser refuses a file that refers to bytes outside of it.
  if (outside != nullptr || size - end > kMaxPaddingBytes) return size;
  const bool zeros = std::all_of(data + end, data + size, [](uint8_t byte) { return byte == 0; });
  return zeros ? static_cast<size_t>(end) : size;
}

}  // namespace torch_cubin
