#include "cubin/embedded.h"

#include <set>

#include "cubin/container.h"
#include "cubin/error.h"
#include "cubin/hex.h"
#include "cubin/sha256.h"

namespace torch_cubin {
namespace {

constexpr uint64_t kBundleHeaderBytes = 24;
constexpr uint64_t kRecordBytes = 64;
constexpr uint64_t kMaxFileNameBytes = 4096;

[[noreturn]] void damaged_bundle(const std::string& origin, uint64_t offset,
                                 const std::string& problem) {
  fail({"image", origin,
        "has a damaged bundle of embedded files at offset " + std::to_string(offset) + ": " +
            problem,
        "", "", "Build or copy the file again."});
}

Bytes part(const Bytes& whole, uint64_t offset, uint64_t size) {
  return Bytes(whole.data() + offset, static_cast<size_t>(size));
}

Bundle read_bundle(const Bytes& whole, uint64_t at, const std::string& origin) {
  const uint64_t count = whole.u64(16);
  if (count > kMaxEntries || !whole.contains(kBundleHeaderBytes, count * kRecordBytes)) {
    damaged_bundle(origin, at, "its table ends outside");
  }
  Bundle bundle;
  std::set<std::string> names;
  // Overlapping parts would let a small file cause unlimited hashing.
  uint64_t end = kBundleHeaderBytes + count * kRecordBytes;
  const auto next = [&](uint64_t offset, uint64_t size) {
    if (offset < end || !whole.contains(offset, size)) {
      damaged_bundle(origin, at, "its files lie outside, or overlap");
    }
    end = offset + size;
    return part(whole, offset, size);
  };
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t record = kBundleHeaderBytes + i * kRecordBytes;
    if (whole.u64(record + 8) > kMaxFileNameBytes)
      damaged_bundle(origin, at, "a file's name is too long");
    EmbeddedFile file;
    file.name = std::string(next(whole.u64(record), whole.u64(record + 8)).text());
    file.offset = at + whole.u64(record + 16);
    file.bytes = next(whole.u64(record + 16), whole.u64(record + 24));
    if (file.name.empty() || !names.insert(file.name).second) {
      damaged_bundle(origin, at, "two of its files have one name, or one has none");
    }
    const std::string expected = hex_text(whole.data() + record + 32, 32);
    const std::string got = sha256_hex(file.bytes.data(), file.bytes.size());
    if (got != expected) {
      fail({"hash", "file '" + printable(file.name) + "' embedded in " + origin,
            "has other content than was embedded", "sha256 " + expected, got,
            "Build or copy the library again."});
    }
    bundle.push_back(std::move(file));
  }
  return bundle;
}

}  // namespace

bool is_package(const Bundle& bundle) {
  for (const EmbeddedFile& file : bundle) {
    if (file.name == "manifest.json") return true;
  }
  return false;
}

void list_bundles(const Bytes& library, uint64_t begin, uint64_t end, const std::string& origin,
                  std::vector<Bundle>& bundles) {
  for (uint64_t at = begin; at < end;) {
    if (library.u8(at) == 0) {  // padding
      ++at;
      continue;
    }
    const Bytes rest = part(library, at, end - at);
    if (!rest.contains(0, kBundleHeaderBytes) ||
        rest.text().substr(0, kBundleMagic.size()) != kBundleMagic) {
      damaged_bundle(origin, at, "it does not begin with " + std::string(kBundleMagic));
    }
    const uint64_t size = rest.u64(8);
    if (size < kBundleHeaderBytes || !rest.contains(0, size))
      damaged_bundle(origin, at, "it ends outside");
    bundles.push_back(read_bundle(part(library, at, size), at, origin));
    at += size;
  }
}

}  // namespace torch_cubin
