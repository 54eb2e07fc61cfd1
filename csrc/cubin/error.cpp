// Builds the library's error messages, and stores the last one of each thread.
#include "cubin/error.h"

#include <cstddef>
#include <utility>

#include "cubin/hex.h"

namespace torch_cubin {
namespace {

// Per thread, so that no thread rethrows another's text.
thread_local std::string last_error_text;

// Length of the well-formed UTF-8 sequence at `text[at]`, or 0. Overlong forms, surrogates and
// code points past U+10FFFF are not well-formed (Unicode 15, table 3-7).
size_t utf8_length(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(at);
  size_t length = 0;
  unsigned char low = 0x80, high = 0xbf;  // bounds of the second byte
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead <= 0xdf) {
    length = 2;
  } else if (lead >= 0xe0 && lead <= 0xef) {
    length = 3;
    if (lead == 0xe0) low = 0xa0;
    if (lead == 0xed) high = 0x9f;
  } else if (lead >= 0xf0 && lead <= 0xf4) {
    length = 4;
    if (lead == 0xf0) low = 0x90;
    if (lead == 0xf4) high = 0x8f;
  } else {
    return 0;
  }
  if (length > text.size() - at) return 0;
  if (byte(at + 1) < low || byte(at + 1) > high) return 0;
  for (size_t i = 2; i < length; ++i) {
    if (byte(at + i) < 0x80 || byte(at + i) > 0xbf) return 0;
  }
  return length;
}

std::string escaped(std::string_view text, size_t limit, bool keep_newlines) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    if (out.size() >= limit) return out + "...";
    const unsigned char byte = static_cast<unsigned char>(text[i]);
    // In UTF-8, the control characters from U+0080 on, one of which starts escape sequences, begin
    // with 0xc2.
    const bool second =
        byte == 0xc2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xa0;
    const bool control = byte < 0x20 || byte == 0x7f || second;
    const size_t length = control && !(keep_newlines && byte == '\n') ? 0 : utf8_length(text, i);
    if (length == 0) {
      out += {'\\', 'x', kHexDigits[byte >> 4], kHexDigits[byte & 15]};
      ++i;
    } else {
      out.append(text, i, length);
      i += length;
    }
  }
  return out;
}

// Escapes invalid UTF-8, which Python would fail to decode, and control characters, which a
// terminal would obey.
std::string clean(const std::string& message) {
  return escaped(message, std::string::npos, /*keep_newlines=*/true);
}

std::string render(const Fault& fault) {
  std::string text = "torch_cubin [";
  // The object may be a file's name, which may contain newlines.
  text.append(fault.tag).append("]: ").append(printable(fault.object, std::string::npos));
  if (!fault.problem.empty()) text.append(fault.object.empty() ? "" : " ").append(fault.problem);
  if (!fault.expected.empty()) text.append(": expected ").append(fault.expected);
  if (!fault.got.empty())
    text.append(fault.expected.empty() ? ": got " : ", got ").append(fault.got);
  text.append(".");
  if (!fault.advice.empty()) text.append(" ").append(fault.advice);
  return text;
}

}  // namespace

std::string printable(std::string_view text, size_t limit) {
  return escaped(text, limit, /*keep_newlines=*/false);
}

std::string counted(uint64_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

void fail(const Fault& fault) {
  auto kept = std::make_shared<Fault>();
  // Without the tag, which may be a view of a caller's temporary.
  kept->object = clean(fault.object);
  kept->problem = clean(fault.problem);
  kept->expected = clean(fault.expected);
  kept->got = clean(fault.got);
  kept->advice = clean(fault.advice);
  last_error_text = clean(render(fault));
  throw Error(std::string(fault.tag), last_error_text, std::move(kept));
}

void fail_with_text(std::string_view tag, const std::string& message) {
  last_error_text = clean(message);
  throw Error(std::string(tag), last_error_text);
}

void fail_out_of_memory(const std::string& what) {
  fail_with_text("oom", "CUDA out of memory. torch_cubin [oom]: " + what +
                            ". Free memory, or call torch.cuda.empty_cache().");
}

const std::string& last_error() { return last_error_text; }

void clear_last_error() { last_error_text.clear(); }

}  // namespace torch_cubin
