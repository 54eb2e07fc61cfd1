// PtxScanner: splits PTX text into words, punctuation and strings, without comments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace torch_cubin {

inline bool is_ptx_digit(char c) { return c >= '0' && c <= '9'; }

inline bool is_ptx_word(char c) {
  return is_ptx_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         c == '$' || c == '%' || c == '.';
}

class PtxScanner {
 public:
  // `origin` names the text in errors, and must outlive this object.
  PtxScanner(std::string_view text, const std::string& origin) : text_(text), origin_(origin) {}

 protected:
  // Reads the next word into word_. Throws [image] for a comment or string without an end.
  void next();

  // The current word as a number. Throws [image] for another word.
  uint64_t number() const;

  // Throws [image] unless the current word is `sign`.
  void require(std::string_view sign) const;

  [[noreturn]] void damaged(const std::string& problem) const;

  const std::string_view text_;
  size_t at_ = 0;          // after the current word
  std::string_view word_;  // a word, punctuation or a string; empty at the end

 private:
  void skip_blanks();

  const std::string& origin_;
};

}  // namespace torch_cubin
