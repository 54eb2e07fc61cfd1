#include "package/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "cubin/error.h"

namespace torch_cubin {
namespace {

[[noreturn]] void fail_to_read(const std::string& path, const std::string& got) {
  fail({"file", "file '" + path + "'", "could not be read", "a readable regular file", got, ""});
}

// Parses the digits from `at` on, and moves `at` past them.
uintptr_t hex_number(const std::string& text, size_t& at) {
  uintptr_t value = 0;
  for (; at < text.size(); ++at) {
    const char c = text[at];
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (digit < 0) break;
    value = value << 4 | static_cast<uintptr_t>(digit);
  }
  return value;
}

struct Descriptor {
  int value;
  ~Descriptor() { close(value); }
};

}  // namespace

// NOTE: stat() would tell whether it is a regular file, but requires GLIBC_2.33 if built on a newer
// system. Instead, O_NONBLOCK opens a FIFO without blocking, and neither a FIFO nor a folder can be
// both seeked and read.
std::vector<uint8_t> read_file(const std::string& path, size_t limit) {
  const int opened = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (opened < 0) fail_to_read(path, std::strerror(errno));
  const Descriptor file{opened};
  char byte = 0;
  if (read(file.value, &byte, 0) < 0) fail_to_read(path, std::strerror(errno));  // a folder
  const off_t size = lseek(file.value, 0, SEEK_END);
  if (size < 0 || lseek(file.value, 0, SEEK_SET) < 0) fail_to_read(path, std::strerror(errno));
  if (static_cast<uint64_t>(size) > limit) {
    fail_to_read(path, std::to_string(size) + " bytes, over the limit of " + std::to_string(limit));
  }
  std::vector<uint8_t> bytes(static_cast<size_t>(size));
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t count = read(file.value, bytes.data() + done, bytes.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail_to_read(path, std::strerror(errno));
    if (count == 0) fail_to_read(path, "a file that shrank while it was read");
    done += static_cast<size_t>(count);
  }
  return bytes;
}

size_t readable_bytes(const void* address) {
  const int opened = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (opened < 0) return 0;
  const Descriptor file{opened};
  std::string text;
  char buffer[4096];
  for (;;) {
    const ssize_t count = read(file.value, buffer, sizeof(buffer));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    text.append(buffer, static_cast<size_t>(count));
  }
  // Each line begins with "start-end rwxp", in hex. Lines are sorted, and an array may span
  // several.
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  uintptr_t reached = 0;
  for (size_t at = 0; at < text.size();) {
    const uintptr_t start = hex_number(text, at);
    const uintptr_t end = hex_number(text, ++at);
    const bool readable = text.compare(at, 2, " r") == 0;
    at = std::min(text.find('\n', at), text.size() - 1) + 1;
    if (reached == 0 ? wanted < start || wanted >= end : start != reached) {
      if (reached != 0) break;
      continue;
    }
    if (!readable) break;
    reached = end;
  }
  return reached == 0 ? 0 : reached - wanted;
}

// Without stat(), as above: a folder cannot be read, and a FIFO cannot be seeked.
bool is_regular_file(const std::string& path) {
  const int opened = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (opened < 0) return false;
  const Descriptor file{opened};
  char byte = 0;
  return lseek(file.value, 0, SEEK_SET) == 0 && read(file.value, &byte, 1) >= 0;
}

}  // namespace torch_cubin
