#include "cubin/near_names.h"

#include <algorithm>
#include <utility>

#include "cubin/error.h"

namespace torch_cubin {
namespace {

// Bounds on the work for one error message, whatever the file holds.
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

// 0 for a name inside the other (a plain name inside its mangled form), otherwise the distance.
size_t difference(const std::string& wanted, const std::string& name) {
  const bool inside = !wanted.empty() && (name.find(wanted) != std::string::npos ||
                                          wanted.find(name) != std::string::npos);
  return inside ? 0 : edit_distance(wanted, name);
}

}  // namespace

std::string nearest_names(const std::vector<KernelInfo>& kernels, const std::string& name) {
  const std::string wanted = folded(name);
  std::vector<std::pair<size_t, size_t>> ranked;
  for (size_t i = 0; i < kernels.size() && i < kMaxCompared; ++i) {
    ranked.emplace_back(difference(wanted, folded(kernels[i].name)), i);
  }
  const size_t shown = std::min(kMaxNamesShown, ranked.size());
  std::partial_sort(ranked.begin(), ranked.begin() + static_cast<std::ptrdiff_t>(shown),
                    ranked.end());
  std::string text;
  for (size_t i = 0; i < shown; ++i) {
    text += (i == 0 ? "'" : ", '") + printable(kernels[ranked[i].second].name) + "'";
  }
  if (kernels.size() > shown) {
    text += " (nearest of " + std::to_string(kernels.size()) + " kernels)";
  }
  return text;
}

}  // namespace torch_cubin
