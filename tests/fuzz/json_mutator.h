// Changes one place of a JSON text: removes, doubles, moves or replaces a value.
#pragma once

#include <nlohmann/json.hpp>

#include "target.h"

namespace fuzz {

// Values that may confuse a contract's reader, in addition to those in the text.
inline const nlohmann::json& odd_json() {
  static const auto* const odd = new nlohmann::json(nlohmann::json::parse(R"json([
    null, true, false, 0, 1, -1, 2, 3, 4, 64, 2147483648, 4294967296, 9007199254740993,
    9223372036854775807, 9223372036854775808, 18446744073709551615, -9223372036854775808, 0.5, 1.0,
    1e300, "", "x", "xs", "xs[1]", "xs[0]", "xs[9]", "z", "out", "more", "n", "m", "k", "*s", "T", "q",
    "q?", "len(xs)", "partial", "float16", "float32", "relu", "\u0000", "\u00e9", [], {},
    ["numel", "x"], ["numel", "z"], ["stride", "xs[1]", 0], ["number", "q"], ["pointer", "xs"],
    ["size", "partial", 1], ["neg", ["number", "n"]], ["sm"], ["is_dtype", "x", "float16"],
    ["pointer", "x"], ["int32", 0], ["number", 0], ["bytes", "00"], ["struct", 8, [[0, ["int32", 1]]]],
    "contiguous", "rows", "dense", "strided", "echo", "vec_add", "tma_box"
  ])json"));
  return *odd;
}

inline std::vector<nlohmann::json*> places(nlohmann::json& tree) {
  std::vector<nlohmann::json*> found{&tree};
  for (size_t i = 0; i < found.size(); ++i) {
    if (!found[i]->is_structured()) continue;
    for (nlohmann::json& item : *found[i]) found.push_back(&item);
  }
  return found;
}

inline size_t mutate_json(uint8_t* data, size_t size, size_t most, uint32_t seed) {
  nlohmann::json tree = nlohmann::json::parse(data, data + size, nullptr, false);
  if (tree.is_discarded()) return 0;
  const auto next = [&seed](size_t bound) {
    seed = seed * 1664525u + 1013904223u;
    return (seed >> 8) % bound;
  };
  for (size_t left = 1 + next(3); left > 0; --left) {
    const std::vector<nlohmann::json*> all = places(tree);
    nlohmann::json& place = *all[next(all.size())];
    const size_t what = next(8);
    if (what == 0 && place.is_array() && !place.empty()) {
      place.erase(next(place.size()));
    } else if (what == 0 && place.is_object() && !place.empty()) {
      place.erase(std::next(place.begin(), static_cast<long>(next(place.size()))));
    } else if (what == 1 && place.is_array() && !place.empty()) {
      const nlohmann::json copy = place[next(place.size())];
      place.insert(place.begin() + static_cast<long>(next(place.size() + 1)), copy);
    } else if (what == 2) {
      const nlohmann::json copy = *all[next(all.size())];
      place = copy;
    } else if (what == 3 && place.is_string() && !place.get_ref<std::string&>().empty()) {
      auto& text = place.get_ref<std::string&>();
      static const std::string kParts[] = {"", "!", "?", "[", " ", "a", ",", "(", "=", "->", "*"};
      text.replace(next(text.size()), 1, kParts[next(11)]);
    } else if (what == 4 && place.is_number_integer()) {
      place = odd_value(static_cast<uint32_t>(next(64)), place.get<uint64_t>(), 64);
    } else {
      place = odd_json()[next(odd_json().size())];
    }
  }
  const std::string text = tree.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  if (text.size() > most) return 0;
  std::memcpy(data, text.data(), text.size());
  return text.size();
}

}  // namespace fuzz
