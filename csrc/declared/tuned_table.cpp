#include "declared/tuned_table.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "package/fields.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

constexpr size_t kMaxParts = 32;
constexpr size_t kMaxKeys = size_t{1} << 20;
constexpr int64_t kUnknownWord = -1;

int64_t place_of(const std::vector<std::string>& words, std::string_view word) {
  const auto found = std::find(words.begin(), words.end(), word);
  return found == words.end() ? kUnknownWord : found - words.begin();
}

}  // namespace

TunedTable::TunedTable(const json& object, const Scope& scope, int64_t groups,
                       const std::string& label) {
  Fields fields(object, label);
  const json& key = fields.list("key");
  const json& entries = fields.list("entries");
  otherwise_ = static_cast<int32_t>(fields.integer("otherwise", 0, groups - 1));
  fields.finish();
  if (key.empty() || key.size() > kMaxParts) {
    refuse_json(fields.at("key"), "1 to " + std::to_string(kMaxParts) + " parts", key.size());
  }
  if (entries.size() > kMaxKeys) {
    refuse_json(fields.at("entries"), "at most " + std::to_string(kMaxKeys), entries.size());
  }
  for (size_t i = 0; i < key.size(); ++i) {
    read_part(key[i], scope, fields.at("key") + "[" + std::to_string(i) + "]");
    find_optional(key, key[i], scope, &parts_.back());
  }
  keys_ = KeyTable(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    const std::string at = fields.at("entries") + "[" + std::to_string(i) + "]";
    const json& entry = entries[i];
    const bool right = entry.is_array() && entry.size() == 2 && entry[0].is_array() &&
                       entry[0].size() == parts_.size() && entry[1].is_number_integer() &&
                       entry[1] >= 0 && entry[1] < groups;
    if (!right) {
      refuse_json(
          at,
          "[" + counted(parts_.size(), "value") + ", a group below " + std::to_string(groups) + "]",
          entry);
    }
    int64_t words[kMaxParts];
    for (size_t part = 0; part < parts_.size(); ++part) {
      words[part] = read_value(parts_[part], entry[0][part], at);
    }
    if (keys_.add(words, parts_.size()) >= 0) refuse_json(at, "each key once", entry);
    group_.push_back(entry[1].get<int32_t>());
  }
}

void TunedTable::read_part(const json& json_part, const Scope& scope, const std::string& label) {
  Part part{};
  const bool named = json_part.is_array() && json_part.size() == 2 && json_part[1].is_string() &&
                     (json_part[0] == "dtype" || json_part[0] == "text");
  if (!named) {
    part.kind = Part::Kind::kValue;
    part.index = static_cast<int32_t>(expressions_.size());
    expressions_.emplace_back(json_part, scope, label);
    parts_.push_back(std::move(part));
    return;
  }
  const bool is_dtype = json_part[0] == "dtype";
  part.kind = is_dtype ? Part::Kind::kDtype : Part::Kind::kText;
  const std::string name = json_part[1].get<std::string>();
  part.index = is_dtype ? scope.find_tensor(name) : scope.find_text(name);
  if (part.index < 0) {
    refuse_json(label, is_dtype ? "a tensor argument of the op" : "a str argument of the op",
                json_part);
  }
  parts_.push_back(std::move(part));
}

void TunedTable::find_optional(const json& key, const json& json_part, const Scope& scope,
                               Part* part) {
  if (!json_part.is_array() || json_part.size() < 2 || !json_part[1].is_string()) return;
  const std::string name = json_part[1].get<std::string>();
  const auto asked = [&](const json& whether) {
    return std::find(key.begin(), key.end(), whether) != key.end();
  };
  if (json_part[0] == "number" && asked({"number", name + "?"})) {
    part->optional_number = scope.find_number(name);
  }
  for (const char* fact : {"size", "stride", "numel", "dim", "itemsize", "contiguous"}) {
    if (json_part[0] != fact || !asked({"defined", name})) continue;
    part->optional_tensor = scope.find_tensor(name);
  }
}

int64_t TunedTable::read_value(Part& part, const json& value, const std::string& label) {
  if (part.kind != Part::Kind::kValue) {
    if (!value.is_string()) refuse_json(label, "a string for a dtype or a text", value);
    const std::string word = value.get<std::string>();
    if (place_of(part.words, word) == kUnknownWord) part.words.push_back(word);
    return place_of(part.words, word);
  }
  switch (expressions_[static_cast<size_t>(part.index)].type()) {
    case ValueType::kFloat:
      if (value.is_number()) return Value::of(value.get<double>()).bits();
      break;
    case ValueType::kBool:
      if (value.is_boolean()) return value.get<bool>() ? 1 : 0;
      break;
    default:
      if (value.is_number_integer()) return value.get<int64_t>();
  }
  refuse_json(label, "values of the key's types", value);
}

int64_t TunedTable::value(const Part& part, const CallState& state) const {
  const auto index = static_cast<size_t>(part.index);
  switch (part.kind) {
    case Part::Kind::kDtype: {
      const TensorFacts& tensor = state.facts[index];
      return tensor.defined ? place_of(part.words, tensor.dtype) : kUnknownWord;
    }
    case Part::Kind::kText:
      return place_of(part.words, state.texts[index]);
    default:
      return expressions_[index].evaluate(state.arguments()).bits();
  }
}

int32_t TunedTable::find(const CallState& state) const {
  int64_t key[kMaxParts];
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    const bool absent =
        (part.optional_number >= 0 &&
         state.numbers[static_cast<size_t>(part.optional_number)].type == ValueType::kNone) ||
        (part.optional_tensor >= 0 &&
         !state.facts[static_cast<size_t>(part.optional_tensor)].defined);
    if (absent) return otherwise_;
    key[i] = value(part, state);
  }
  const int32_t found = keys_.find(key, parts_.size());
  return found < 0 ? otherwise_ : group_[static_cast<size_t>(found)];
}

}  // namespace torch_cubin
