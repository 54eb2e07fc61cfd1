// Containers: fatbins, host ELF files, static libraries, arrays in C source, bundles of embedded
// files.
#include <set>

#include "cubin/arch.h"
#include "cubin/container.h"
#include "cubin/embedded.h"
#include "cubin/sha256.h"
#include "elf_mutator.h"
#include "target.h"

namespace fuzz {
namespace {

using torch_cubin::Bytes;
using torch_cubin::Container;
using torch_cubin::Entry;
using torch_cubin::Format;

constexpr size_t kMostUnpacked = 1 << 18;  // the fuzzer's own memory is bounded

void check_entry(const Entry& entry, const uint8_t* data, size_t size) {
  if (entry.owned != nullptr) {
    require(entry.stored.size() == entry.owned->size() && entry.offset < size);
  } else {
    require(entry.offset <= size && entry.stored.size() <= size - entry.offset);
    require(entry.stored.data() == data + entry.offset);
  }
  for (const int device_sm : {80, 103}) {  // only what runs there has a rank
    const int rank = torch_cubin::rank_cubin(entry.arch, device_sm);
    require(rank >= 0 && (rank == 0 || entry.arch.runs_on(device_sm)));
    require(torch_cubin::rank_ptx(entry.arch, device_sm) >= 0);
  }
}

// What list_entries promises of every container, two levels deep, and unpack of every entry.
void check_entries(const std::vector<Entry>& entries, const uint8_t* data, size_t size, int depth) {
  size_t unpacked = 0;
  for (const Entry& entry : entries) {
    check_entry(entry, data, size);
    unpacked += entry.size;
    if (unpacked > kMostUnpacked) break;
    accepts({"image"}, [&] {
      const torch_cubin::Buffer bytes = torch_cubin::unpack(entry, "an entry");
      require(bytes.size() == entry.size);
      if (entry.format != Format::kFatbin || depth == 2) return;
      const Container inner = torch_cubin::list_entries(bytes.data(), bytes.size(), "an entry");
      check_entries(inner.entries, bytes.data(), bytes.size(), depth + 1);
    });
  }
}

void run_fatbin(const uint8_t* data, size_t size) {
  std::vector<Entry> entries;
  if (accepts({"image"}, [&] { list_fatbin(Bytes(data, size), 0, "the input", entries); })) {
    check_entries(entries, data, size, 1);
  }
}

void run_host_elf(const uint8_t* data, size_t size) {
  accepts({"image", "hash"}, [&] {
    Container found;
    list_host_elf(Bytes(data, size), "the input", found);
    check_entries(found.entries, data, size, 0);
    torch_cubin::embedded_bundles(Bytes(data, size), "the input");
  });
}

void run_static_library(const uint8_t* data, size_t size) {
  accepts({"image", "hash"}, [&] {
    Container found;
    list_static_library(Bytes(data, size), "the input", found);
    check_entries(found.entries, data, size, 0);
    for (const torch_cubin::LibraryMember& member :
         torch_cubin::members_of(Bytes(data, size), "the input")) {
      require(member.offset <= size && member.content.size() <= size - member.offset);
      require(member.content.data() == data + member.offset);
    }
  });
}

void run_c_arrays(const uint8_t* data, size_t size) {
  std::vector<Entry> entries;
  if (accepts({"image"}, [&] { list_arrays(Bytes(data, size), "the input", entries); })) {
    check_entries(entries, data, size, 0);
  }
}

void run_bundle(const uint8_t* data, size_t size) {
  accepts({"image", "hash"}, [&] {
    std::vector<torch_cubin::Bundle> bundles;
    torch_cubin::list_bundles(Bytes(data, size), 0, size, "the input", bundles);
    for (const torch_cubin::Bundle& bundle : bundles) {
      std::set<std::string> names;
      for (const torch_cubin::EmbeddedFile& file : bundle) {
        require(!file.name.empty() && names.insert(file.name).second);
        require(file.offset <= size && file.bytes.size() <= size - file.offset);
        require(file.bytes.data() == data + file.offset);
      }
    }
  });
}

// The header of the fatbin, or that of one of its entries.
size_t mutate_fatbin(uint8_t* data, size_t size, size_t, uint32_t seed) {
  if (size < 80) return 0;
  uint64_t at = 16;
  for (uint32_t skip = seed / 8 % 4; skip > 0; --skip) {
    uint32_t header = 0;
    uint64_t padded = 0;
    std::memcpy(&header, data + at + 4, 4);
    std::memcpy(&padded, data + at + 8, 8);
    if (header > size || padded > size || at + header + padded + 64 > size) break;
    at += header + padded;
  }
  if (seed % 8 == 0) return rewrite_field(data, size, 0, 16, seed * 2654435761u);
  return rewrite_field(data, size, at, at + 64, seed * 2654435761u);
}

// A field of the bundle's tables; then every content's hash is made right again.
size_t mutate_bundle(uint8_t* data, size_t size, size_t, uint32_t seed) {
  if (size < 24) return 0;
  const auto load = [&](size_t at) {
    uint64_t value = 0;
    std::memcpy(&value, data + at, 8);
    return value;
  };
  uint64_t count = load(16);
  if (count > (size - 24) / 64) count = (size - 24) / 64;
  if (rewrite_field(data, size, 0, 24 + count * 64, seed * 2654435761u) == 0) return 0;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t record = 24 + i * 64, start = load(record + 16), length = load(record + 24);
    if (start > size || length > size - start) continue;
    const std::string digest = torch_cubin::sha256_hex(data + start, length);
    for (size_t j = 0; j < 32; ++j) {
      data[record + 32 + j] = static_cast<uint8_t>(std::stoi(digest.substr(2 * j, 2), nullptr, 16));
    }
  }
  return size;
}

const Register kFatbin({"fatbin", run_fatbin, mutate_fatbin});
const Register kHostElf({"host_elf", run_host_elf, mutate_elf});
const Register kArrays({"c_arrays", run_c_arrays, nullptr});
const Register kStaticLibrary({"static_library", run_static_library, nullptr});
const Register kBundle({"bundle", run_bundle, mutate_bundle});

}  // namespace
}  // namespace fuzz
