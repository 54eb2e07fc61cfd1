#include "cubin/ptx_scanner.h"

#include "cubin/error.h"

namespace torch_cubin {

void PtxScanner::skip_blanks() {
  while (at_ < text_.size()) {
    const std::string_view rest = text_.substr(at_);
    if (rest[0] == ' ' || (rest[0] >= '\t' && rest[0] <= '\r')) {
      ++at_;
      continue;
    }
    const bool line = rest.substr(0, 2) == "//";
    if (!line && rest.substr(0, 2) != "/*") return;
    const size_t end = rest.find(line ? "\n" : "*/", 2);
    if (end == std::string_view::npos) {
      if (!line) damaged("it ends within a comment");
      at_ = text_.size();
      return;
    }
    at_ += end + (line ? 1 : 2);
  }
}

void PtxScanner::next() {
  skip_blanks();
  const size_t start = at_;
  if (start == text_.size()) {
    word_ = {};
    return;
  }
  if (text_[start] == '"') {
    for (++at_; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (text_[at_] == '\\') ++at_;
    }
    if (at_ >= text_.size()) damaged("it ends within a string");
    ++at_;
  } else if (is_ptx_word(text_[start])) {
    while (at_ < text_.size() && is_ptx_word(text_[at_])) ++at_;
  } else {
    ++at_;
  }
  word_ = text_.substr(start, at_ - start);
}

void PtxScanner::require(std::string_view sign) const {
  if (word_ == sign) return;
  damaged(word_.empty()
              ? "it ends within a declaration"
              : "'" + printable(word_, 40) + "' stands where '" + std::string(sign) + "' should");
}

uint64_t PtxScanner::number() const {
  if (word_.empty() || !is_ptx_digit(word_[0]) || word_.size() > 10) {
    damaged("'" + printable(word_, 40) + "' stands where a number should");
  }
  uint64_t value = 0;
  for (const char c : word_) {
    if (!is_ptx_digit(c)) damaged("'" + printable(word_, 40) + "' stands where a number should");
    value = value * 10 + static_cast<uint64_t>(c - '0');
  }
  return value;
}

void PtxScanner::damaged(const std::string& problem) const {
  fail({"image", origin_, "is damaged PTX: " + problem, "", "", "Build or copy it again."});
}

}  // namespace torch_cubin
