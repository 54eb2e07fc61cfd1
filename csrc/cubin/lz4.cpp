// lz4_decompress, and the functions shared with the zstd decoder.
#include <cstring>

#include "cubin/decompress.h"
#include "cubin/error.h"

namespace torch_cubin {
namespace {

constexpr size_t kMinMatch = 4;
constexpr size_t kMaxRatio = 255;  // one length byte means at most 255 bytes

// A length of 15 continues in the following bytes, up to the first that is not 255.
size_t read_length(const Bytes& in, size_t& at, size_t nibble, const std::string& origin) {
  size_t length = nibble;
  if (nibble != 15) return length;
  while (true) {
    if (at >= in.size()) damaged_data(origin, "LZ4 data end within a length");
    const uint8_t more = in.u8(at++);
    length += more;
    if (more != 255) return length;
  }
}

}  // namespace

void damaged_data(const std::string& origin, const std::string& problem) {
  fail({"image", origin, "is damaged: its " + problem, "", "", "Build or copy the file again."});
}

void copy_match(Buffer& out, size_t distance, size_t length) {
  const size_t start = out.size() - distance;
  out.resize(out.size() + length);
  uint8_t* to = out.data() + (out.size() - length);
  const uint8_t* from = out.data() + start;
  if (length <= distance) {
    std::memcpy(to, from, length);
    return;
  }
  for (size_t i = 0; i < length; ++i) to[i] = from[i];  // the ranges may overlap
}

Buffer lz4_decompress(const Bytes& in, size_t size, const std::string& origin) {
  Buffer out;
  if (size / kMaxRatio > in.size()) damaged_data(origin, "LZ4 data are too few for their size");
  out.reserve(size);
  size_t at = 0;
  while (at < in.size()) {
    const uint8_t token = in.u8(at++);
    const size_t literals = read_length(in, at, token >> 4, origin);
    if (!in.contains(at, literals)) damaged_data(origin, "LZ4 data end within literals");
    if (literals > size - out.size()) damaged_data(origin, "LZ4 data hold more than their size");
    out.insert(out.end(), in.data() + at, in.data() + at + literals);
    at += literals;
    if (at == in.size()) break;  // the last sequence has no match
    if (!in.contains(at, 2)) damaged_data(origin, "LZ4 data end within a match");
    const size_t distance = in.u16(at);
    at += 2;
    if (distance == 0 || distance > out.size()) {
      damaged_data(origin, "LZ4 data copy from before their start");
    }
    const size_t length = read_length(in, at, token & 15, origin) + kMinMatch;
    if (length > size - out.size()) damaged_data(origin, "LZ4 data hold more than their size");
    copy_match(out, distance, length);
  }
  if (out.size() != size) damaged_data(origin, "LZ4 data hold less than their size");
  return out;
}

}  // namespace torch_cubin
