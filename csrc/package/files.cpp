#include "package/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "cubin/error.h"

namespace torch_cubin {
namespace {

[[noreturn]] void fail_to_read(const std::string& path, const std::string& got) {
  fail({"file", "file '" + path + "'", "could not be read", "a readable regular file", got, ""});
}

struct Descriptor {
  int value;
  ~Descriptor() { close(value); }
};

}  // namespace

// NOTE: stat() would ask whether it is a regular file, but needs GLIBC_2.33 when built on a newer
// system. O_NONBLOCK keeps the open of a FIFO from waiting, and neither a FIFO nor a directory
// can be both seeked and read.
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

// The same without stat(): of what can be opened, a folder cannot be read, and a FIFO not seeked.
bool is_regular_file(const std::string& path) {
  const int opened = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (opened < 0) return false;
  const Descriptor file{opened};
  char byte = 0;
  return lseek(file.value, 0, SEEK_SET) == 0 && read(file.value, &byte, 1) >= 0;
}

}  // namespace torch_cubin
