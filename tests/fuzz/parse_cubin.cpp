// libFuzzer target: any bytes through everything that reads device code (tests/fuzz/run.sh).
//
// Built with -DTORCH_CUBIN_REPLAY it has a main() of its own that runs the files given
// as arguments once each, for compilers without libFuzzer.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "cubin/arch.h"
#include "cubin/container.h"
#include "cubin/error.h"
#include "cubin/image.h"
#include "cubin/inspect.h"
#include "cubin/sha256.h"

namespace {

constexpr size_t kMostUnpacked = 1 << 22;  // the fuzzer's own memory is bounded

// Ends the program, so that the fuzzer keeps the input.
void require(bool condition) {
  if (!condition) __builtin_trap();
}

// What parse_cubin promises of every image that it accepts.
void check_image(const torch_cubin::Image& image, size_t size) {
  require(image.size == size && image.arch.sm >= 20 && image.arch.sm <= 255);
  for (size_t i = 0; i < image.kernels.size(); ++i) {
    const torch_cubin::KernelInfo& kernel = image.kernels[i];
    require(!kernel.name.empty() && (i == 0 || image.kernels[i - 1].name < kernel.name));
    uint32_t end = 0;
    for (size_t j = 0; j < kernel.params.size(); ++j) {
      require(kernel.params[j].index == j && kernel.params[j].offset >= end);
      end = kernel.params[j].offset + kernel.params[j].size;
    }
    require(end == kernel.param_bytes);
    require(&image.kernel(kernel.name) == &kernel);
  }
}

// What list_entries promises of every container, two levels deep, and unpack of every entry.
void check_container(const uint8_t* data, size_t size, int depth) {
  const torch_cubin::Container found = torch_cubin::list_entries(data, size, "the input");
  require(found.size == size);
  size_t unpacked = 0;
  for (const torch_cubin::Entry& entry : found.entries) {
    if (entry.owned != nullptr) {
      require(entry.stored.size() == entry.owned->size() && entry.offset < size);
    } else {
      require(entry.offset <= size && entry.stored.size() <= size - entry.offset);
      require(entry.stored.data() == data + entry.offset);
    }
    unpacked += entry.size;
    if (unpacked > kMostUnpacked) break;
    try {
      const torch_cubin::Buffer bytes = torch_cubin::unpack(entry, "an entry");
      require(bytes.size() == entry.size);
      if (entry.format == torch_cubin::Format::kFatbin && depth < 2) {
        check_container(bytes.data(), bytes.size(), depth + 1);
      }
    } catch (const torch_cubin::Error& error) {
      require(error.tag() == "image");
    }
  }
  for (const torch_cubin::Entry& entry : found.entries) {
    for (int device_sm : {80, 90, 103, 121}) {
      // Only what runs there has a rank.
      const int rank = torch_cubin::rank_cubin(entry.arch, device_sm);
      require(rank >= 0 && (rank == 0 || entry.arch.runs_on(device_sm)));
      require(torch_cubin::rank_ptx(entry.arch, device_sm) >= 0);
    }
  }
}

// A zstd frame by itself: deeper than the fuzzer gets through a fatbin's headers.
void check_zstd(const uint8_t* data, size_t size) {
  uint32_t claimed = 0;
  if (size < 9 || std::memcmp(data, "\x28\xb5\x2f\xfd", 4) != 0) return;
  std::memcpy(&claimed, data + 5, 4);
  const int flag = data[4] >> 6;
  const size_t wanted = flag == 0 ? data[5] : flag == 1 ? (claimed & 0xffff) + 256 : claimed;
  try {
    const torch_cubin::Buffer out = torch_cubin::zstd_decompress(
        torch_cubin::Bytes(data, size), wanted % kMostUnpacked, "the input");
    require(out.size() == wanted % kMostUnpacked);
  } catch (const torch_cubin::Error& error) {
    require(error.tag() == "image");
  }
}

void check_inspect(const uint8_t* data, size_t size) {
  try {
    check_container(data, size, 0);
    torch_cubin::inspect_to_json(data, size, "the input");
  } catch (const torch_cubin::Error& error) {
    require(error.tag() == "image" || error.tag() == "hash");  // of files that embed.py put there
    require(torch_cubin::last_error() == error.what());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // A block of exactly this size, so that AddressSanitizer sees the first byte read past its end.
  std::unique_ptr<uint8_t[]> copy(new uint8_t[size]);
  if (size > 0) std::memcpy(copy.get(), data, size);
  check_zstd(copy.get(), size);
  check_inspect(copy.get(), size);
  try {
    const torch_cubin::Image image = torch_cubin::parse_cubin(copy.get(), size, "the input");
    check_image(image, size);
    torch_cubin::image_to_json(image);
    try {
      image.kernel("no such kernel");
    } catch (const torch_cubin::Error& error) {
      require(error.tag() == "no_kernel");
    }
  } catch (const torch_cubin::Error& error) {
    require(error.tag() == "image" && torch_cubin::last_error() == error.what());
  }
  return 0;
}

#ifndef TORCH_CUBIN_REPLAY
#include <random>

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

// Half of the time one field of one table, at its own width, becomes a value that parsers trip
// over: random bytes alone seldom get past the first table.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  std::minstd_rand random(seed);
  if (size < 64 || random() % 2 == 0) return LLVMFuzzerMutate(data, size, max_size);
  const auto load = [&](size_t at, size_t width) {
    uint64_t value = 0;
    std::memcpy(&value, data + at, width);
    return value;
  };
  const uint64_t sections = load(40, 8), count = load(60, 2);
  uint64_t begin = 0, end = 64;  // the ELF header, or a section header, or a section
  if (random() % 8 != 0 && count > 0 && sections <= size && count * 64 <= size - sections) {
    begin = sections + random() % count * 64;
    end = begin + 64;
    const uint64_t start = load(begin + 24, 8), length = load(begin + 32, 8);
    if (random() % 2 == 0 && start <= size && length <= size - start && length > 0) {
      begin = start;
      end = start + length;
    }
  }
  const size_t width = size_t{1} << random() % 4;
  if (end - begin < width) return LLVMFuzzerMutate(data, size, max_size);
  const size_t at = begin + random() % ((end - begin) / width) * width;
  const uint64_t old = load(at, width);
  const uint64_t values[] = {0,
                             1,
                             old + 1,
                             old - 1,
                             size,
                             size - 1,
                             size + 1,
                             old + size,
                             ~uint64_t{0} - old,
                             old ^ 16,
                             ~uint64_t{0},
                             uint64_t{1} << 63};
  const uint64_t value = values[random() % (sizeof values / sizeof values[0])];
  std::memcpy(data + at, &value, width);
  return size;
}

#else
#include <cstdio>
#include <vector>

int main(int count, char** paths) {
  for (int i = 1; i < count; ++i) {
    std::FILE* file = std::fopen(paths[i], "rb");
    if (file == nullptr) {
      std::fprintf(stderr, "cannot open %s\n", paths[i]);
      return 1;
    }
    std::vector<uint8_t> bytes;
    for (int c; (c = std::getc(file)) != EOF;) bytes.push_back(static_cast<uint8_t>(c));
    std::fclose(file);
    std::fprintf(stderr, "%s\n", paths[i]);  // the last one named is the one that ends it
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%d inputs\n", count - 1);
  return 0;
}
#endif
