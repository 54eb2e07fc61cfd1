// Runs the target that FUZZ_FORMAT names: as libFuzzer's entry points, or, built with
// -DTORCH_CUBIN_REPLAY for compilers without libFuzzer, over files:
// main FORMAT=FILE..., or main @LIST with one of these a line.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>

#include "target.h"

namespace fuzz {
namespace {

const Target* g_target = nullptr;

const Target* find(const std::string& format) {
  for (const Target& target : targets()) {
    if (format == target.format) return &target;
  }
  std::fprintf(stderr, "no format '%s'; known:", format.c_str());
  for (const Target& target : targets()) std::fprintf(stderr, " %s", target.format);
  std::fprintf(stderr, "\n");
  std::exit(2);
}

}  // namespace

std::vector<Target>& targets() {
  static auto* const all = new std::vector<Target>;
  return *all;
}

uint64_t odd_value(uint32_t choice, uint64_t old, size_t size) {
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
                             old + 64,
                             ~uint64_t{0},
                             uint64_t{1} << 63};
  return values[choice % (sizeof values / sizeof values[0])];
}

size_t rewrite_field(uint8_t* data, size_t size, uint64_t begin, uint64_t end, uint32_t seed) {
  const size_t width = size_t{1} << seed % 4;
  if (end > size || begin > end || end - begin < width) return 0;
  seed /= 4;
  const size_t at = begin + seed % ((end - begin) / width) * width;
  uint64_t value = 0;
  std::memcpy(&value, data + at, width);
  value = odd_value(seed / 64, value, size);
  std::memcpy(data + at, &value, width);
  return size;
}

}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::g_target->run(data, size);  // libFuzzer gives a block of exactly this size
  return 0;
}

#ifndef TORCH_CUBIN_REPLAY

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t most);

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  const char* format = std::getenv("FUZZ_FORMAT");
  fuzz::g_target = fuzz::find(format != nullptr ? format : "");
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned seed) {
  if (fuzz::g_target->mutate != nullptr && seed % 2 == 0) {
    const size_t changed = fuzz::g_target->mutate(data, size, most, seed / 2);
    if (changed != 0) return changed;
  }
  return LLVMFuzzerMutate(data, size, most);
}

#else

int main(int count, char** arguments) {
  std::vector<std::string> words(arguments + 1, arguments + count);
  if (words.size() == 1 && words[0][0] == '@') {
    std::ifstream list(words[0].substr(1));
    words.clear();
    for (std::string line; std::getline(list, line);) words.push_back(line);
  }
  for (const std::string& word : words) {
    const size_t equals = word.find('=');
    fuzz::g_target = fuzz::find(word.substr(0, equals));
    std::FILE* file = std::fopen(word.c_str() + equals + 1, "rb");
    if (file == nullptr) {
      std::fprintf(stderr, "cannot open %s\n", word.c_str());
      return 1;
    }
    std::vector<uint8_t> bytes;
    for (int c; (c = std::getc(file)) != EOF;) bytes.push_back(static_cast<uint8_t>(c));
    std::fclose(file);
    std::fprintf(stderr, "%s\n", word.c_str());  // the last one named is the one that ends it
    std::unique_ptr<uint8_t[]> exact(new uint8_t[bytes.size()]);
    if (!bytes.empty()) std::memcpy(exact.get(), bytes.data(), bytes.size());
    LLVMFuzzerTestOneInput(exact.get(), bytes.size());
  }
  std::printf("%zu inputs\n", words.size());
  return 0;
}
#endif
