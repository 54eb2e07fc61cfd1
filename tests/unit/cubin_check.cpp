// Drives csrc/cubin from tests/unit (no torch, no CUDA; built with sanitizers by cubin_check.py).
//
//   facts FILE...            a line of JSON a file: the image, or {"error": {"tag", "message"}}
//   lookup FILE NAME         the kernel's name, or the error
//   inspect FILE...          the same of inspect_to_json: any kind of file
//   truncate FILE            refuses each of the lengths 0 to size - 1?
//   truncate_inspect FILE, flip_inspect FILE SEED COUNT: the same with inspect_to_json
//   edit_inspect FILE LIMIT  every field of the first LIMIT bytes
//   unpack FILE INDEX... OUT the entry's bytes; of a container in a container: two indexes
//   decompress lz4|zstd|lzma FILE SIZE OUT
//   rank SM ENTRY...         how well entries such as cubin:90a, ptx:80 serve a device; 0: not
//   append FILE              refuses trailing bytes?
//   edit FILE                every byte and every field of every table, set to what breaks parsers
//   flip FILE SEED COUNT     random bit flips
//   noise SEED COUNT         random bytes, most of them behind a good start
//   runs_on ARCH SUFFIX SM   1 or 0
//   sha256 FILE
//   message TAG OBJECT PROBLEM EXPECTED GOT ADVICE | printable TEXT LIMIT
//
// Each parsed input lies in a heap block of exactly its size, so that AddressSanitizer sees the
// first byte read past its end. The loops print {"refused": n, "accepted": n, "seconds": max}.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cubin/arch.h"
#include "cubin/container.h"
#include "cubin/error.h"
#include "cubin/image.h"
#include "cubin/inspect.h"
#include "cubin/sha256.h"

namespace torch_cubin {
namespace {

Buffer read_file(const char* path) {
  std::FILE* file = std::fopen(path, "rb");
  if (file == nullptr) throw std::runtime_error(std::string("cannot open ") + path);
  Buffer bytes;
  uint8_t block[65536];
  for (size_t n; (n = std::fread(block, 1, sizeof block, file)) > 0;) {
    bytes.insert(bytes.end(), block, block + n);
  }
  std::fclose(file);
  return bytes;
}

// JSON by hand: the library's header alone doubles the time to build this program.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (c == '\n') {
      out += "\\n";
    } else {
      out += c;
    }
  }
  return out + "\"";
}

void print_error(const Error& error) {
  std::printf("{\"error\": {\"tag\": %s, \"message\": %s}}\n", quoted(error.tag()).c_str(),
              quoted(error.what()).c_str());
}

void write_file(const char* path, const Buffer& bytes) {
  std::FILE* file = std::fopen(path, "wb");
  if (file == nullptr) throw std::runtime_error(std::string("cannot write ") + path);
  if (!bytes.empty()) std::fwrite(bytes.data(), 1, bytes.size(), file);
  std::fclose(file);
}

using Read = void (*)(const uint8_t*, size_t, bool);

void read_cubin(const uint8_t* data, size_t size, bool and_print) {
  const Image image = parse_cubin(data, size, "bytes");
  if (and_print) image_to_json(image);
}

void read_anything(const uint8_t* data, size_t size, bool) { inspect_to_json(data, size, "bytes"); }

// What the loops below count.
struct Tally {
  explicit Tally(Read read = read_cubin) : read(read) {}

  Read read;
  size_t refused = 0;
  size_t accepted = 0;
  double slowest = 0;

  // Parses a copy of exactly `size` bytes; anything but success or [image] ends the program.
  bool parse(const uint8_t* data, size_t size, bool and_print = true) {
    std::unique_ptr<uint8_t[]> copy(new uint8_t[size]);
    if (size > 0) std::memcpy(copy.get(), data, size);
    const std::clock_t start = std::clock();
    bool ok = true;
    try {
      read(copy.get(), size, and_print);
      ++accepted;
    } catch (const Error& error) {
      const bool expected = error.tag() == "image" || error.tag() == "hash";  // embedded files'
      if (!expected || last_error() != error.what()) throw;
      ++refused;
      ok = false;
    }
    slowest = std::max(slowest, static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
    return ok;
  }

  void print() const {
    std::printf("{\"refused\": %zu, \"accepted\": %zu, \"seconds\": %.3f}\n", refused, accepted,
                slowest);
  }
};

void truncate(const Buffer& file, Read read) {
  Tally tally(read);
  for (size_t n = 0; n < file.size(); ++n) {
    const bool accepted = tally.parse(file.data(), n);
    if (accepted && read == read_cubin) {
      std::printf("accepted at %zu of %zu bytes\n", n, file.size());
    }
  }
  tally.print();
}

void append(const Buffer& file) {
  Tally tally;
  for (size_t extra : {1, 2, 7, 8, 64, 4096}) {
    for (uint8_t value : {0x00, 0xff}) {
      Buffer longer = file;
      longer.insert(longer.end(), extra, value);
      tally.parse(longer.data(), longer.size());
    }
  }
  tally.print();
}

uint64_t load(const Buffer& file, size_t at, size_t width) {
  uint64_t value = 0;
  for (size_t i = width; i-- > 0;) value = value << 8 | file[at + i];
  return value;
}

void store(Buffer& file, size_t at, size_t width, uint64_t value) {
  for (size_t i = 0; i < width; ++i) file[at + i] = static_cast<uint8_t>(value >> (8 * i));
}

void edit_range(Tally& tally, Buffer& file, size_t begin, size_t end) {
  for (size_t width : {1, 2, 4, 8}) {
    for (size_t at = begin; at + width <= end; at += width) {
      const uint64_t old = load(file, at, width), size = file.size();
      const uint64_t values[] = {0,
                                 1,
                                 old + 1,
                                 old - 1,
                                 ~uint64_t{0},
                                 size,
                                 size - 1,
                                 size + 1,
                                 uint64_t{1} << 31,
                                 uint64_t{1} << 63,
                                 old ^ 16,
                                 old + size,
                                 ~uint64_t{0} - size + 1,
                                 ~uint64_t{0} - old};
      for (uint64_t value : values) {
        store(file, at, width, value);
        tally.parse(file.data(), file.size(), /*and_print=*/false);
      }
      store(file, at, width, old);
    }
  }
}

// ELF header, program headers, section headers, symbols, and the bytes of the attribute sections.
void edit(Buffer file) {
  Tally tally;
  edit_range(tally, file, 0, 64);
  const size_t programs = load(file, 32, 8), sections = load(file, 40, 8);
  const size_t section_count = load(file, 60, 2);
  edit_range(tally, file, programs, programs + 56 * load(file, 56, 2));
  edit_range(tally, file, sections, sections + 64 * section_count);
  for (size_t i = 0; i < section_count; ++i) {
    const size_t at = sections + 64 * i;
    const uint64_t type = load(file, at + 4, 4);
    const bool table = type == 2 || type == 7 || type == 0x70000000 || type == 0x70000086;
    const size_t start = load(file, at + 24, 8), size = load(file, at + 32, 8);
    if (table) edit_range(tally, file, start, start + size);
  }
  tally.print();
}

// The first `limit` bytes of a container, where its own tables are.
void edit_start(Buffer file, size_t limit) {
  Tally tally(read_anything);
  edit_range(tally, file, 0, std::min(limit, file.size()));
  tally.print();
}

void flip(const Buffer& original, unsigned seed, int count, Read read) {
  Tally tally(read);
  std::mt19937 random(seed);
  for (int i = 0; i < count; ++i) {
    Buffer file = original;
    for (unsigned flips = 1 + random() % 8; flips > 0; --flips) {
      file[random() % file.size()] ^= static_cast<uint8_t>(1u << random() % 8);
    }
    tally.parse(file.data(), file.size());
  }
  tally.print();
}

void noise(unsigned seed, int count) {
  const uint8_t start[] = {0x7f, 'E', 'L', 'F', 2, 1, 1, 0x41, 8,   0,
                           0,    0,   0,   0,   0, 0, 2, 0,    190, 0};
  Tally tally;
  std::mt19937 random(seed);
  for (int i = 0; i < count; ++i) {
    Buffer file(random() % 600);
    for (uint8_t& byte : file) byte = static_cast<uint8_t>(random() % 4 ? random() % 80 : random());
    if (i % 4 != 0) std::copy_n(start, std::min(sizeof start, file.size()), file.begin());
    tally.parse(file.data(), file.size());
  }
  tally.print();
}

void facts(const char* path) {
  try {
    const Buffer file = read_file(path);
    std::puts(image_to_json(parse_cubin(file.data(), file.size(), "the file")).c_str());
  } catch (const Error& error) {
    print_error(error);
  }
}

void inspect(const char* path) {
  try {
    const Buffer file = read_file(path);
    std::puts(inspect_to_json(file.data(), file.size(), "the file").c_str());
  } catch (const Error& error) {
    print_error(error);
  }
}

void unpack_to(const std::vector<std::string>& words) {
  Buffer bytes = read_file(words.at(1).c_str());
  for (size_t i = 2; i + 1 < words.size(); ++i) {
    const Container container = list_entries(bytes.data(), bytes.size(), "the file");
    Buffer entry = unpack(container.entries.at(std::stoul(words[i])), "the entry");
    bytes = std::move(entry);
  }
  write_file(words.back().c_str(), bytes);
  std::printf("%zu\n", bytes.size());
}

void decompress(const std::vector<std::string>& words) {
  const Buffer file = read_file(words.at(2).c_str());
  std::unique_ptr<uint8_t[]> copy(new uint8_t[file.size()]);
  std::copy(file.begin(), file.end(), copy.get());
  const Bytes stored(copy.get(), file.size());
  const size_t size = std::stoul(words.at(3));
  const auto decoder = words.at(1) == "lz4"    ? lz4_decompress
                       : words.at(1) == "zstd" ? zstd_decompress
                                               : lzma_decompress;
  write_file(words.at(4).c_str(), decoder(stored, size, "the data"));
  std::puts("done");
}

// "cubin:90a", "ptx:80", "relocatable_cubin:90"
Entry described(const std::string& text) {
  const size_t colon = text.find(':');
  const std::string kind = text.substr(0, colon), arch = text.substr(colon + 1);
  Entry entry;
  for (Format format : {Format::kCubin, Format::kRelocatableCubin, Format::kPtx, Format::kLtoIr}) {
    if (kind == format_name(format)) entry.format = format;
  }
  entry.arch.sm = std::atoi(arch.c_str());
  if (arch.back() == 'a' || arch.back() == 'f') entry.arch.suffix = arch.back();
  return entry;
}

void rank(const std::vector<std::string>& words) {
  for (size_t i = 2; i < words.size(); ++i) {
    const Entry entry = described(words[i]);
    const auto rank = entry.format == Format::kPtx ? rank_ptx : rank_cubin;
    std::printf("%d\n", rank(entry.arch, std::stoi(words.at(1))));
  }
}

int run(const std::vector<std::string>& words) {
  const std::string& mode = words.at(0);
  const auto word = [&](size_t i) { return words.at(i).c_str(); };
  const auto number = [&](size_t i) { return std::atoi(words.at(i).c_str()); };
  if (mode == "facts") {
    for (size_t i = 1; i < words.size(); ++i) facts(word(i));
  } else if (mode == "lookup") {
    const Buffer file = read_file(word(1));
    std::puts(parse_cubin(file.data(), file.size(), "the file").kernel(words.at(2)).name.c_str());
  } else if (mode == "truncate") {
    truncate(read_file(word(1)), read_cubin);
  } else if (mode == "truncate_inspect") {
    truncate(read_file(word(1)), read_anything);
  } else if (mode == "flip_inspect") {
    flip(read_file(word(1)), static_cast<unsigned>(number(2)), number(3), read_anything);
  } else if (mode == "edit_inspect") {
    edit_start(read_file(word(1)), static_cast<size_t>(number(2)));
  } else if (mode == "inspect") {
    for (size_t i = 1; i < words.size(); ++i) inspect(word(i));
  } else if (mode == "unpack") {
    unpack_to(words);
  } else if (mode == "decompress") {
    decompress(words);
  } else if (mode == "rank") {
    rank(words);
  } else if (mode == "append") {
    append(read_file(word(1)));
  } else if (mode == "edit") {
    edit(read_file(word(1)));
  } else if (mode == "flip") {
    flip(read_file(word(1)), static_cast<unsigned>(number(2)), number(3), read_cubin);
  } else if (mode == "noise") {
    noise(static_cast<unsigned>(number(1)), number(2));
  } else if (mode == "runs_on") {
    const char suffix = words.at(2) == "-" ? 0 : words.at(2)[0];
    std::puts(Arch{number(1), suffix}.runs_on(number(3)) ? "1" : "0");
  } else if (mode == "sha256") {
    const Buffer file = read_file(word(1));
    std::puts(sha256_hex(file.data(), file.size()).c_str());
  } else if (mode == "printable") {
    std::puts(printable(words.at(1), static_cast<size_t>(number(2))).c_str());
  } else if (mode == "message") {
    fail({words.at(1), words.at(2), words.at(3), words.at(4), words.at(5), words.at(6)});
  } else {
    return 2;
  }
  return 0;
}

}  // namespace
}  // namespace torch_cubin

// Commands are read from stdin, a line each, their words apart by tabs: one process answers many.
int main() {
  std::string line;
  for (int c; (c = std::getchar()) != EOF;) {
    if (c != '\n') {
      line += static_cast<char>(c);
      continue;
    }
    std::vector<std::string> words(1);
    for (char letter : line) {
      if (letter == '\t') {
        words.emplace_back();
      } else {
        words.back() += letter;
      }
    }
    line.clear();
    try {
      if (torch_cubin::run(words) != 0) return 2;
    } catch (const torch_cubin::Error& error) {
      torch_cubin::print_error(error);
    }
    std::fflush(stdout);
  }
  return 0;
}
