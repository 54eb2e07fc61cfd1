// LZ4 blocks, zstd frames and LZMA streams by themselves: deeper than the fuzzer gets through a
// fatbin's headers.
#include "cubin/decompress.h"
#include "target.h"

namespace fuzz {
namespace {

using torch_cubin::Buffer;
using torch_cubin::Bytes;

constexpr size_t kMost = 1 << 16;  // bytes out

// An independent decoder of LZ4 blocks, written from the format's document; false for bytes that
// are not a block of at most kMost bytes.
bool plain_lz4(const uint8_t* in, size_t size, Buffer& out) {
  size_t at = 0;
  const auto length = [&](size_t nibble, size_t& total) {
    total = nibble;
    if (nibble < 15) return true;
    for (uint8_t more = 255; more == 255;) {
      if (at == size) return false;
      more = in[at++];
      total += more;
    }
    return true;
  };
  while (at < size) {
    const uint8_t token = in[at++];
    size_t count = 0;
    if (!length(token >> 4, count) || count > size - at || out.size() + count > kMost) return false;
    for (size_t i = 0; i < count; ++i) out.push_back(in[at++]);
    if (at == size) return true;
    if (size - at < 2) return false;
    const size_t distance = in[at] | in[at + 1] << 8;
    at += 2;
    if (distance == 0 || distance > out.size() || !length(token & 15, count)) return false;
    if (out.size() + count + 4 > kMost) return false;
    for (size_t i = 0; i < count + 4; ++i) out.push_back(out[out.size() - distance]);
  }
  return true;
}

// With the size that the block has, and with another that the last byte says.
void run_lz4(const uint8_t* data, size_t size) {
  Buffer wanted;
  const bool whole = plain_lz4(data, size, wanted);
  Buffer out;
  const bool taken = accepts({"image"}, [&] {
    out = torch_cubin::lz4_decompress(Bytes(data, size), wanted.size(), "the input");
  });
  require(taken ? whole && out == wanted : !whole);
  if (size == 0 || data[size - 1] >= 128) return;
  const size_t other = wanted.size() ^ data[size - 1];
  if (other == wanted.size()) return;
  require(!accepts({"image"},
                   [&] { torch_cubin::lz4_decompress(Bytes(data, size), other, "the input"); }));
}

// The size that the frame's header claims; if it claims none, from the last byte.
void run_zstd(const uint8_t* data, size_t size) {
  size_t wanted = size == 0 ? 0 : data[size - 1];
  if (size > 13) {
    uint64_t claimed = 0;
    const int flag = data[4] >> 6;
    const bool single = (data[4] & 32) != 0;
    const size_t at = 5 + (single ? 0 : 1) + (1 << (data[4] & 3)) / 2;
    std::memcpy(&claimed, data + at, 8 < size - at ? 8 : size - at);
    if (flag == 0 && single) wanted = claimed & 0xff;
    if (flag == 1) wanted = (claimed & 0xffff) + 256;
    if (flag == 2) wanted = claimed & 0xffffffff;
    if (flag == 3) wanted = claimed;
    wanted %= kMost;
  }
  accepts({"image"}, [&] {
    const Buffer out = torch_cubin::zstd_decompress(Bytes(data, size), wanted, "the input");
    require(out.size() == wanted);
  });
}

// The size that the header names; if it names none, from the last two bytes.
void run_lzma(const uint8_t* data, size_t size) {
  uint64_t wanted = UINT64_MAX;
  if (size >= 13) std::memcpy(&wanted, data + 5, sizeof wanted);
  if (wanted == UINT64_MAX) wanted = size < 2 ? 0 : data[size - 2] << 8 | data[size - 1];
  wanted %= kMost;
  accepts({"image"}, [&] {
    const Buffer out = torch_cubin::lzma_decompress(Bytes(data, size), wanted, "the input");
    require(out.size() == wanted);
  });
}

const Register kLz4({"lz4", run_lz4, nullptr});
const Register kZstd({"zstd", run_zstd, nullptr});
const Register kLzma({"lzma", run_lzma, nullptr});

}  // namespace
}  // namespace fuzz
