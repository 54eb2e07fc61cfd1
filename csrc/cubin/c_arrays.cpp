// list_arrays: device code in C and C++ sources, as arrays of numbers.
//
//   unsigned char kernel_cubin[] = {0x7f, 0x45, 0x4c, 0x46, ...};       TensorRT-LLM, xxd -i, bin2c
//   #define CUBIN_NAME k_cubin / unsigned char CUBIN_NAME[5600] = {...}; Triton's AOT tool
//   static const unsigned long long fatbinData[] = {0x...ull, ...};      fatbinary --no-asm
//
// A scanner of C's tokens: skips comments, strings, preprocessor lines except macros that alias a
// name, and all other arrays.
#include <string_view>
#include <unordered_map>
#include <utility>

#include "cubin/container.h"
#include "cubin/error.h"
#include "cubin/ptx.h"

namespace torch_cubin {
namespace {

// Longer statements are not declarations of byte arrays.
constexpr size_t kMaxTokens = 64;

bool is_c_word(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

// The value of one hex digit, or 16.
unsigned digit(char c) {
  if (c >= '0' && c <= '9') return static_cast<unsigned>(c - '0');
  if (c >= 'a' && c <= 'f') return static_cast<unsigned>(c - 'a') + 10;
  if (c >= 'A' && c <= 'F') return static_cast<unsigned>(c - 'A') + 10;
  return 16;
}

// A C integer literal: decimal, 0x, 0b, octal, with digit separators and suffixes.
bool parse_integer(std::string_view word, uint64_t& value) {
  unsigned base = 10;
  if (word.size() > 1 && word[0] == '0') {
    const char mark = word[1];
    base = mark == 'x' || mark == 'X' ? 16 : mark == 'b' || mark == 'B' ? 2 : 8;
    word.remove_prefix(base == 8 ? 1 : 2);
  }
  while (!word.empty() &&
         (word.back() == 'u' || word.back() == 'U' || word.back() == 'l' || word.back() == 'L')) {
    word.remove_suffix(1);
  }
  value = 0;
  if (word.empty()) return base == 8;  // the only digit of "0u" was read as the octal prefix
  for (const char c : word) {
    if (c == '\'') continue;
    const unsigned d = digit(c);
    if (d >= base || value > (UINT64_MAX - d) / base) return false;
    value = value * base + d;
  }
  return true;
}

class ArrayReader {
 public:
  ArrayReader(const Bytes& file, const std::string& origin, std::vector<Entry>& entries)
      : text_(file.text()), origin_(origin), entries_(entries) {}

  // Collects tokens until a statement ends or a brace opens possible array contents.
  void read() {
    std::vector<std::string_view> statement;
    bool too_long = false;
    for (std::string_view token = next(); !token.empty(); token = next()) {
      if (token == ";" || token == "}") {
        statement.clear();
        too_long = false;
      } else if (token == "{") {
        const size_t start = at_ - 1;
        if (!too_long) read_array(statement, start);
        statement.clear();
        too_long = false;
      } else if (statement.size() < kMaxTokens) {
        statement.push_back(token);
      } else {
        too_long = true;
      }
    }
  }

 private:
  std::string_view next();
  bool skip_blanks();
  void read_directive(std::string_view line);
  void read_array(const std::vector<std::string_view>& statement, size_t start);
  bool read_numbers(int width, Buffer& bytes);

  std::string_view text_;
  const std::string& origin_;
  std::vector<Entry>& entries_;
  size_t at_ = 0;
  bool line_start_ = true;
  std::unordered_map<std::string_view, std::string_view> aliases_;  // #define A B
};

// Skips blanks, comments and preprocessor lines. Returns false at the end.
bool ArrayReader::skip_blanks() {
  while (at_ < text_.size()) {
    const char c = text_[at_];
    const std::string_view start = text_.substr(at_, 2);
    if (c == '\n') line_start_ = true;
    if (c == ' ' || c == '\\' || (c >= '\t' && c <= '\r')) {
      ++at_;
    } else if (start == "//" || start == "/*") {
      const bool line = start == "//";
      const size_t end = text_.find(line ? "\n" : "*/", at_ + 2);
      at_ = end == std::string_view::npos ? text_.size() : end + (line ? 0 : 2);
    } else if (c == '#' && line_start_) {
      size_t end = at_;
      do {  // a backslash joins the next line
        end = text_.find('\n', end + 1);
      } while (end != std::string_view::npos && text_[end - 1] == '\\');
      if (end == std::string_view::npos) end = text_.size();
      read_directive(text_.substr(at_, end - at_));
      at_ = end;
    } else {
      return true;
    }
  }
  return false;
}

// Records `#define NAME OTHER` if both are plain names.
void ArrayReader::read_directive(std::string_view line) {
  std::string_view words[3];
  size_t count = 0;
  for (size_t i = 1; i < line.size();) {
    if (line[i] == ' ' || line[i] == '\t' || line[i] == '\r') {
      ++i;
      continue;
    }
    const size_t from = i;
    while (i < line.size() && is_c_word(line[i])) ++i;
    if (i == from || count == 3) return;
    words[count++] = line.substr(from, i - from);
  }
  if (count == 3 && words[0] == "define") aliases_[words[1]] = words[2];
}

std::string_view ArrayReader::next() {
  if (!skip_blanks()) return {};
  line_start_ = false;
  const size_t start = at_;
  const char c = text_[start];
  if (is_c_word(c)) {
    // A quote within a number is a digit separator.
    const bool number = c >= '0' && c <= '9';
    while (at_ < text_.size() && (is_c_word(text_[at_]) || (number && text_[at_] == '\''))) ++at_;
  } else if (c == '"' || c == '\'') {
    for (++at_; at_ < text_.size() && text_[at_] != c && text_[at_] != '\n'; ++at_) {
      if (text_[at_] == '\\') ++at_;
    }
    at_ = at_ < text_.size() ? at_ + 1 : text_.size();
  } else {
    ++at_;
  }
  return text_.substr(start, at_ - start);
}

// Bytes per element of the integer type in a declaration; 0 if it has none.
int element_width(const std::vector<std::string_view>& words) {
  int width = 0, longs = 0;
  for (const std::string_view word : words) {
    if (word == "char" || word == "uint8_t" || word == "int8_t" || word == "byte" ||
        word == "u_char" || word == "uchar" || word == "BYTE") {
      return 1;
    }
    if (word == "short" || word == "uint16_t" || word == "int16_t") return 2;
    if (word == "uint32_t" || word == "int32_t") return 4;
    if (word == "uint64_t" || word == "int64_t" || word == "nv_uint64") return 8;
    if (word == "int" || word == "unsigned") width = 4;
    if (word == "long") ++longs;
  }
  return longs > 0 ? 8 : width;
}

// The name before the first '[' that is not an attribute's; empty if there is none.
std::string_view array_name(const std::vector<std::string_view>& words) {
  int parentheses = 0, brackets = 0;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string_view word = words[i];
    if (word == "(") ++parentheses;
    if (word == ")") --parentheses;
    if (word == "]") --brackets;
    if (word != "[") continue;
    if (parentheses == 0 && brackets == 0 && i > 0 && is_c_word(words[i - 1][0])) {
      return words[i - 1];
    }
    ++brackets;
  }
  return {};
}

// Reads numbers and commas until the closing brace. Returns false for anything else.
bool ArrayReader::read_numbers(int width, Buffer& bytes) {
  bool comma = true, minus = false;
  for (std::string_view token = next(); !token.empty(); token = next()) {
    if (token == "}") return !minus;
    if (token == "," && !comma) {
      comma = true;
    } else if (token == "-" && comma && !minus) {
      minus = true;
    } else {
      uint64_t value = 0;
      if (!comma || !parse_integer(token, value)) return false;
      if (width < 8 && value >> (8 * width) != 0) return false;
      if (minus) value = ~value + 1;
      for (int i = 0; i < width; ++i) bytes.push_back(static_cast<uint8_t>(value >> (8 * i)));
      comma = minus = false;
    }
  }
  return false;  // the text ends inside the array
}

void ArrayReader::read_array(const std::vector<std::string_view>& statement, size_t start) {
  const std::string_view name = array_name(statement);
  if (name.empty() || (statement.back() != "=" && statement.back() != "]")) return;
  const int width = element_width(statement);
  if (width == 0) return;
  auto bytes = std::make_shared<Buffer>();
  const size_t inside = at_;
  if (!read_numbers(width, *bytes)) {
    // A truncated array of device code is an error; any other array is skipped.
    const bool ends = at_ >= text_.size();
    const Format begun = sniff(bytes->data(), bytes->size(), "").format;
    if (ends && (begun == Format::kCubin || begun == Format::kFatbin)) {
      fail({"image", origin_,
            "is damaged C source: it ends within the array '" + printable(name) + "'", "", "",
            "Copy it again."});
    }
    at_ = inside;
    return;
  }
  const Format format = sniff(bytes->data(), bytes->size(), "").format;
  if (format == Format::kOther || format == Format::kText || format == Format::kHostElf ||
      format == Format::kStaticLibrary) {
    return;
  }
  if (entries_.size() == kMaxEntries) {
    fail({"image", origin_, "has more than " + std::to_string(kMaxEntries) + " arrays", "", "",
          "Take the part that you want out of it."});
  }
  const auto alias = aliases_.find(name);
  Entry entry;
  entry.format = format;
  entry.name = std::string((alias != aliases_.end() ? alias->second : name).substr(0, 1024));
  entry.offset = start;
  entry.stored = Bytes(bytes->data(), bytes->size());
  entry.size = bytes->size();
  entry.owned = std::move(bytes);
  entries_.push_back(std::move(entry));
}

}  // namespace

void list_arrays(const Bytes& file, const std::string& origin, std::vector<Entry>& entries) {
  ArrayReader(file, origin, entries).read();
}

}  // namespace torch_cubin
