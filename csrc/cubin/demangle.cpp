#include "cubin/demangle.h"

#include <cxxabi.h>

#include <cstdlib>
#include <memory>

namespace torch_cubin {
namespace {

// Past these a demangler's time or stack could be the file's to choose.
constexpr size_t kMaxSymbolBytes = 4096;

struct FreesName {
  void operator()(char* text) const { std::free(text); }
};

// Where the parameter list begins; the end where there is none.
size_t parameters_of(std::string_view text) {
  constexpr std::string_view kUnnamed = "(anonymous namespace)";
  int depth = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '<') ++depth;
    if (text[i] == '>') --depth;
    if (text[i] != '(' || depth > 0) continue;
    if (text.substr(i, kUnnamed.size()) != kUnnamed) return i;
    i += kUnnamed.size() - 1;
  }
  return text.size();
}

// What stands behind the last `separator` that is in no template's arguments.
std::string_view last_part(std::string_view text, std::string_view separator) {
  int depth = 0;
  for (size_t i = text.size(); i-- > 0;) {
    if (text[i] == '>') ++depth;
    if (text[i] == '<') --depth;
    if (depth == 0 && text.substr(i, separator.size()) == separator) {
      return text.substr(i + separator.size());
    }
  }
  return text;
}

std::string_view without_template(std::string_view name) { return name.substr(0, name.find('<')); }

}  // namespace

std::string demangled(const std::string& symbol) {
  if (symbol.rfind("_Z", 0) != 0 || symbol.size() > kMaxSymbolBytes) return "";
  int status = 0;
  const std::unique_ptr<char, FreesName> text(
      abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status));
  return status == 0 && text != nullptr ? text.get() : "";
}

bool is_name_of(std::string_view demangled, std::string_view name) {
  if (demangled.empty() || name.empty()) return false;
  if (name == demangled) return true;
  const size_t parameters = parameters_of(demangled);
  const std::string_view function = last_part(demangled.substr(0, parameters), " ");
  if (name == function) return true;
  // The function and its parameters, without the type that it returns.
  const size_t start = static_cast<size_t>(function.data() - demangled.data());
  if (name == demangled.substr(start)) return true;
  const std::string_view own = last_part(function, "::");
  // "ns::fill" of "ns::fill<int>": only the arguments of the last part are omitted.
  const size_t scope = function.size() - own.size();
  return name == own || name == without_template(own) ||
         name == function.substr(0, scope + without_template(own).size());
}

}  // namespace torch_cubin
