#include "cubin/cpp_spelling.h"

#include <algorithm>
#include <iterator>
#include <vector>

namespace torch_cubin {
namespace {

bool is_word(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         c == '$';
}

// The text's words and single punctuation characters, without blanks.
std::vector<std::string_view> words_of(std::string_view text) {
  std::vector<std::string_view> words;
  for (size_t at = 0; at < text.size();) {
    size_t end = at;
    while (end < text.size() && is_word(text[end])) ++end;
    if (end == at) ++end;
    if (text[at] != ' ' && text[at] != '\t' && text[at] != '\n') {
      words.push_back(text.substr(at, end - at));
    }
    at = end;
  }
  return words;
}

std::string joined(const std::vector<std::string_view>& words) {
  std::string text;
  for (const std::string_view word : words) {
    if (!text.empty() && is_word(text.back()) && is_word(word.front())) text += ' ';
    text += word;
  }
  return text;
}

// Whether the text's character there belongs to a function's name, as in `operator<`.
bool is_operator(std::string_view text, size_t at) {
  constexpr std::string_view kWord = "operator";
  while (at > 0 && (text[at - 1] == '<' || text[at - 1] == '>' || text[at - 1] == '-')) --at;
  return at >= kWord.size() && text.substr(at - kWord.size(), kWord.size()) == kWord;
}

struct Spelling {
  std::string_view from, to;
};
constexpr Spelling kSpellings[] = {
    {"half", "__half"},
    {"nv_half", "__half"},
    {"half2", "__half2"},
    {"nv_half2", "__half2"},
    {"nv_bfloat16", "__nv_bfloat16"},
    {"nv_bfloat162", "__nv_bfloat162"},
    {"int8_t", "signed char"},
    {"uint8_t", "unsigned char"},
    {"int16_t", "short"},
    {"uint16_t", "unsigned short"},
    {"int32_t", "int"},
    {"uint32_t", "unsigned int"},
    {"int64_t", "long"},
    {"uint64_t", "unsigned long"},
    {"size_t", "unsigned long"},
    {"ptrdiff_t", "long"},
};

bool is_one_of(std::string_view word, std::initializer_list<std::string_view> words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

bool is_part_of_integer(std::string_view word) {
  return is_one_of(word, {"unsigned", "signed", "long", "int", "short", "char"});
}

// The integer type that these words name, in any order.
std::string_view integer_type(const std::vector<std::string_view>& words) {
  const auto count = [&](std::string_view word) {
    return std::count(words.begin(), words.end(), word);
  };
  const bool is_unsigned = count("unsigned") != 0;
  if (count("char") != 0) {
    return is_unsigned ? "unsigned char" : count("signed") != 0 ? "signed char" : "char";
  }
  if (count("short") != 0) return is_unsigned ? "unsigned short" : "short";
  if (count("long") > 1) return is_unsigned ? "unsigned long long" : "long long";
  if (count("long") == 1) return is_unsigned ? "unsigned long" : "long";
  return is_unsigned ? "unsigned int" : "int";
}

std::string_view without_suffix(std::string_view word) {
  if (word.front() < '0' || word.front() > '9') return word;
  const size_t end = word.find_first_not_of("0123456789");
  const bool suffix = end != std::string_view::npos &&
                      word.find_first_not_of("uUlL", end) == std::string_view::npos;
  return suffix ? word.substr(0, end) : word;
}

}  // namespace

std::vector<int> bracket_depths(std::string_view text) {
  std::vector<int> depths(text.size());
  std::string open;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    // A demangler puts operands in parentheses, and template arguments after names.
    const bool is_angle = (c == '<' || c == '>') && !is_operator(text, i);
    const bool opens = c == '(' || c == '[' || c == '{' ||
                       (c == '<' && is_angle && i > 0 && text[i - 1] != ')' && text[i - 1] != '<');
    const bool closes = c == ')' || c == ']' || c == '}' ||
                        (c == '>' && is_angle && !open.empty() && open.back() == '<');
    if (closes && !open.empty()) open.pop_back();
    depths[i] = static_cast<int>(open.size());
    if (opens) open += c;
  }
  return depths;
}

std::string without_blanks(std::string_view text) { return joined(words_of(text)); }

std::string common_spelling(std::string_view text) {
  constexpr std::string_view kUnnamed[] = {"(", "anonymous", "namespace", ")", ":", ":"};
  const std::vector<std::string_view> words = words_of(text);
  std::vector<std::string_view> out;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string_view word = words[i];
    if (is_one_of(word, {"const", "volatile", "__restrict__", "__restrict", "restrict", "struct",
                         "class", "union", "enum"})) {
      continue;
    }
    if (words.size() - i >= std::size(kUnnamed) &&
        std::equal(std::begin(kUnnamed), std::end(kUnnamed), &words[i])) {
      i += std::size(kUnnamed) - 1;
      continue;
    }
    if (is_part_of_integer(word)) {
      std::vector<std::string_view> type;
      for (; i < words.size(); ++i) {
        if (is_part_of_integer(words[i])) {
          type.push_back(words[i]);
        } else if (!is_one_of(words[i], {"const", "volatile"})) {
          break;
        }
      }
      --i;
      out.push_back(integer_type(type));
      continue;
    }
    if (word == "std" && i + 3 < words.size() && words[i + 1] == ":" && words[i + 2] == ":" &&
        words[i + 3].size() > 2 && words[i + 3].substr(words[i + 3].size() - 2) == "_t") {
      i += 2;  // std::int32_t
      continue;
    }
    const auto known =
        std::find_if(std::begin(kSpellings), std::end(kSpellings),
                     [&](const Spelling& spelling) { return spelling.from == word; });
    out.push_back(known != std::end(kSpellings) ? known->to : without_suffix(word));
  }
  return joined(out);
}

}  // namespace torch_cubin
