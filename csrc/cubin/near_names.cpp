#include "cubin/near_names.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "cubin/demangle.h"

namespace torch_cubin {
namespace {

// Bounds on the work per error message.
constexpr size_t kMaxCompared = 2000;
constexpr size_t kMaxLetters = 96;
constexpr size_t kMaxNamesShown = 3;

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

std::string folded(const std::string& name) {
  std::string text = name.substr(0, kMaxLetters);
  std::transform(text.begin(), text.end(), text.begin(), lower);
  return text;
}

// Levenshtein distance of two short texts.
size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

// The distance of the bare identifiers; 0 if one contains the other, unless the contained one is
// too short to be significant.
size_t difference(const std::string& wanted, const std::string& symbol) {
  constexpr size_t kFewLetters = 3;
  const std::string text = demangled_if_short(symbol);
  const std::string name = folded(std::string(identifier_of(text.empty() ? symbol : text)));
  const auto holds = [](const std::string& whole, const std::string& part) {
    return part.size() >= kFewLetters && whole.find(part) != std::string::npos;
  };
  return holds(name, wanted) || holds(wanted, name) ? 0 : edit_distance(wanted, name);
}

}  // namespace

std::vector<std::string> names_of(const std::vector<KernelInfo>& kernels) {
  std::vector<std::string> names;
  names.reserve(kernels.size());
  for (const KernelInfo& kernel : kernels) names.push_back(kernel.name);
  return names;
}

std::string nearest_names(const std::vector<std::string>& names, const std::string& name) {
  const std::string_view identifier = identifier_of(name);
  const std::string wanted = folded(identifier.empty() ? name : std::string(identifier));
  std::vector<std::pair<size_t, size_t>> ranked;
  for (size_t i = 0; i < names.size() && i < kMaxCompared; ++i) {
    ranked.emplace_back(difference(wanted, names[i]), i);
  }
  const size_t shown = std::min(kMaxNamesShown, ranked.size());
  std::partial_sort(ranked.begin(), ranked.begin() + static_cast<std::ptrdiff_t>(shown),
                    ranked.end());
  std::string text;
  for (size_t i = 0; i < shown; ++i) {
    text += (i == 0 ? "" : ", ") + shown_symbol(names[ranked[i].second]);
  }
  if (names.size() > shown) text += " (nearest of " + std::to_string(names.size()) + " names)";
  return text;
}

}  // namespace torch_cubin
