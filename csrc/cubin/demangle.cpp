#include "cubin/demangle.h"

#include <cxxabi.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <memory>
#include <utility>

#include "cubin/cpp_spelling.h"
#include "cubin/error.h"

namespace torch_cubin {
namespace {

// Bounds the demangler's time and stack.
constexpr size_t kMaxSymbolBytes = 4096;
constexpr size_t kMostTextBytes = 1 << 20;

struct FreesName {
  void operator()(char* text) const { std::free(text); }
};

bool is_identifier(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

// The position of the bracket that the text's last character closes; the text's end if it is none.
size_t last_bracket(std::string_view text, char open, char close) {
  if (text.empty() || text.back() != close) return text.size();
  const std::vector<int> depths = bracket_depths(text);
  for (size_t i = text.size() - 1; i-- > 0;) {
    if (text[i] == open && depths[i] == depths.back()) return i;
  }
  return text.size();
}

// The position of the '(' that opens the parameter list at the end of the text; the text's end if
// there is none, as for a variable.
size_t parameters_at(std::string_view text) {
  const size_t clone = text.find(" [clone");
  if (clone != std::string_view::npos) text = text.substr(0, clone);
  return last_bracket(text, '(', ')');
}

// The positions after each `separator` outside of template arguments and parentheses, the last
// first.
std::vector<size_t> places_behind(std::string_view name, std::string_view separator) {
  std::vector<size_t> places;
  const std::vector<int> depths = bracket_depths(name);
  for (size_t i = name.size(); i-- > 0;) {
    if (depths[i] == 0 && name.substr(i, separator.size()) == separator) {
      places.push_back(i + separator.size());
    }
  }
  return places;
}

// The position of the last component's template arguments; the name's end if it has none.
size_t template_at(std::string_view name) { return last_bracket(name, '<', '>'); }

// Whether `name` refers to the demangled function. Both must be spelled by the same function.
bool is_name_of(std::string_view demangled, std::string_view name) {
  if (name == demangled) return true;
  const size_t open = parameters_at(demangled);
  const std::string_view parameters = demangled.substr(open);
  std::string_view function = demangled.substr(0, open);
  const std::vector<size_t> blanks = places_behind(function, " ");
  if (!blanks.empty()) function.remove_prefix(blanks.front());  // the return type
  const bool is_global = name.substr(0, 2) == "::";
  if (is_global) name.remove_prefix(2);
  std::vector<size_t> starts;
  if (!is_global) starts = places_behind(function, "::");
  starts.push_back(0);
  return std::any_of(starts.begin(), starts.end(), [&](size_t start) {
    const std::string_view scoped = function.substr(start);
    const std::string_view bare = scoped.substr(0, template_at(scoped));
    if (name == scoped || name == bare) return true;
    if (parameters.empty() || name.size() < parameters.size()) return false;
    const size_t rest = name.size() - parameters.size();
    return name.substr(rest) == parameters &&
           (name.substr(0, rest) == scoped || name.substr(0, rest) == bare);
  });
}

}  // namespace

std::string demangled(const std::string& symbol) {
  if (symbol.rfind("_Z", 0) != 0 || symbol.size() > kMaxSymbolBytes) return "";
  int status = 0;
  const std::unique_ptr<char, FreesName> text(
      abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status));
  return status == 0 && text != nullptr ? text.get() : "";
}

// NOTE: the worst growth per reference is three references to the preceding part, which triple the
// text: `S0_S0_S0_`. The demangler itself has no limit.
std::string demangled_if_short(const std::string& symbol) {
  size_t bytes = symbol.size(), references = 0;
  for (size_t i = 0; i + 1 < symbol.size(); ++i) {
    if (symbol[i] != 'S' && symbol[i] != 'T') continue;
    size_t end = i + 1;
    while (end < symbol.size() && symbol[end] != '_' && std::isalnum(symbol[end])) ++end;
    if (end == symbol.size() || symbol[end] != '_') continue;
    if (++references % 3 == 0) bytes *= 3;
    if (bytes > kMostTextBytes) return "";
  }
  return demangled(symbol);
}

bool find_parameters(std::string_view demangled, std::string_view* parameters) {
  const size_t open = parameters_at(demangled);
  if (open >= demangled.size() || demangled[open] != '(') return false;
  *parameters = demangled.substr(open + 1);
  *parameters = parameters->substr(0, parameters->rfind(')'));
  return true;
}

std::string_view identifier_of(std::string_view name) {
  name = name.substr(0, parameters_at(name));
  const std::vector<size_t> scopes = places_behind(name, "::");
  if (!scopes.empty()) name.remove_prefix(scopes.front());
  name = name.substr(0, template_at(name));
  size_t begin = name.size();
  while (begin > 0 && is_identifier(name[begin - 1])) --begin;
  return name.substr(begin);
}

std::vector<std::string> symbols_called(const std::vector<std::string>& symbols,
                                        const std::string& name) {
  if (std::find(symbols.begin(), symbols.end(), name) != symbols.end()) return {name};
  const std::string given = without_blanks(name);
  const std::string_view identifier = identifier_of(given);
  if (identifier.empty()) return {};
  std::vector<std::pair<std::string, std::string>> possible;  // symbols and their demangled text
  for (const std::string& symbol : symbols) {
    if (symbol.find(identifier) == std::string::npos) continue;
    std::string text = demangled(symbol);
    if (!text.empty()) possible.emplace_back(symbol, std::move(text));
  }
  std::vector<std::string> found;
  for (std::string (*spelled)(std::string_view) : {&without_blanks, &common_spelling}) {
    const std::string wanted = spelled(name);
    for (const auto& [symbol, text] : possible) {
      if (is_name_of(spelled(text), wanted)) found.push_back(symbol);
    }
    if (!found.empty()) break;
  }
  return found;
}

std::string shown_symbol(const std::string& symbol) {
  const std::string text = demangled(symbol);
  return "'" + printable(symbol) + "'" + (text.empty() ? "" : " (" + printable(text) + ")");
}

}  // namespace torch_cubin
