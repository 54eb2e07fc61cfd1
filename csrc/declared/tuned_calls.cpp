#include "declared/tuned_calls.h"

#include <algorithm>

#include "cubin/error.h"
#include "package/fields.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

constexpr size_t kMaxCalls = size_t{1} << 16;
constexpr int64_t kAbsent = -1;

int64_t word_of_dtype(const char* text) {
  return static_cast<int64_t>(reinterpret_cast<intptr_t>(text));  // one address for each dtype
}

json list_of(const int64_t* values, int64_t count) {
  return std::vector<int64_t>(values, values + count);
}

void read_integers(const json& list, const std::string& label, std::vector<int64_t>& out) {
  if (!list.is_array() || list.size() > static_cast<size_t>(kMaxDims)) {
    refuse_json(label, "a list of integers", list);
  }
  for (const json& one : list) {
    if (!one.is_number_integer()) refuse_json(label, "a list of integers", list);
    out.push_back(one.get<int64_t>());
  }
}

}  // namespace

size_t CallKey::write(const CallState& state, const Words& words, int64_t* out) const {
  size_t n = 0;
  for (const Part& part : parts_) {
    if (n + 3 > kMostWords) return 0;
    switch (part.kind) {
      case Part::kTensor: {
        const TensorFacts& facts = state.facts[part.place];
        if (!facts.defined) {
          out[n++] = kAbsent;
          break;
        }
        const auto dim = static_cast<size_t>(facts.dim);
        if (n + 2 + 2 * dim > kMostWords) return 0;
        out[n++] = word_of_dtype(facts.dtype);
        out[n++] = facts.dim;
        for (size_t i = 0; i < dim; ++i) out[n++] = facts.sizes[i];
        for (size_t i = 0; has_strides_ && i < dim; ++i) out[n++] = facts.strides[i];
        break;
      }
      case Part::kNumber: {
        const Value& value = state.numbers[part.place];
        out[n++] = static_cast<int64_t>(value.type);  // 1 and 1.0 are distinct
        out[n++] = value.type == ValueType::kNone ? 0 : value.bits();
        break;
      }
      case Part::kText: {
        const auto found = std::find(words.begin(), words.end(), state.texts[part.place]);
        if (found == words.end()) return 0;
        out[n++] = found - words.begin();
      }
    }
  }
  return n;
}

json CallKey::shown(const CallState& state) const {
  json key = json::object();
  for (const Part& part : parts_) {
    json& shown = key[part.name];  // null unless the call passes it
    switch (part.kind) {
      case Part::kTensor: {
        const TensorFacts& facts = state.facts[part.place];
        if (!facts.defined) break;
        shown = {facts.dtype, list_of(facts.sizes, facts.dim)};
        if (has_strides_) shown.push_back(list_of(facts.strides, facts.dim));
        break;
      }
      case Part::kNumber: {
        const Value& value = state.numbers[part.place];
        if (value.type == ValueType::kInt) shown = value.integer;
        if (value.type == ValueType::kBool) shown = value.integer != 0;
        if (value.type == ValueType::kFloat) shown = value.number;
        break;
      }
      case Part::kText:
        shown = std::string(state.texts[part.place]);
    }
  }
  return key;
}

std::vector<int64_t> CallKey::read(const json& key, const std::string& label, Words& words) const {
  std::vector<int64_t> out;
  if (!key.is_object() || key.size() != parts_.size()) {
    refuse_json(label, counted(parts_.size(), "value") + " by name", key);
  }
  for (const Part& part : parts_) {
    const std::string at = label + "." + part.name;
    const auto found = key.find(part.name);
    if (found == key.end()) refuse_json(at, "a value", json());
    const json& value = *found;
    switch (part.kind) {
      case Part::kTensor: {
        if (value.is_null()) {
          out.push_back(kAbsent);
          break;
        }
        ScalarType dtype{};
        const bool right = value.is_array() && value.size() == (has_strides_ ? 3U : 2U) &&
                           value[0].is_string() &&
                           find_dtype(value[0].get<std::string>(), &dtype) && value[1].is_array();
        if (!right) refuse_json(at, "a dtype and sizes", value);
        out.push_back(word_of_dtype(dtype_text(dtype)));
        out.push_back(static_cast<int64_t>(value[1].size()));
        read_integers(value[1], at, out);
        if (has_strides_) read_integers(value[2], at, out);
        break;
      }
      case Part::kNumber: {
        Value number;
        if (value.is_null()) {
          number.type = ValueType::kNone;
        } else if (value.is_boolean()) {
          number = Value::of(value.get<bool>());
        } else if (value.is_number_integer()) {
          number = Value::of(value.get<int64_t>());
        } else if (value.is_number_float()) {
          number = Value::of(value.get<double>());
        } else {
          refuse_json(at, "a number", value);
        }
        out.push_back(static_cast<int64_t>(number.type));
        out.push_back(number.bits());
        break;
      }
      case Part::kText: {
        if (!value.is_string()) refuse_json(at, "a string", value);
        const std::string text = value.get<std::string>();
        const auto known = std::find(words.begin(), words.end(), text);
        out.push_back(known - words.begin());
        if (known == words.end()) words.push_back(text);
      }
    }
  }
  return out;
}

TunedCalls::TunedCalls(const json& calls, const CallKey& key, size_t kernels,
                       const std::string& label, OnBadLine on_bad_line) {
  if (!calls.is_array() || calls.size() > kMaxCalls) {
    refuse_json(label, "a list of at most " + std::to_string(kMaxCalls), calls);
  }
  keys_ = KeyTable(calls.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    try {
      add(calls[i], key, kernels, label + "[" + std::to_string(i) + "]");
    } catch (const Error&) {
      if (on_bad_line == kThrow) throw;
    }
  }
}

void TunedCalls::add(const json& call, const CallKey& key, size_t kernels,
                     const std::string& label) {
  const auto has_kernel = [&](const char* name) {
    return call.contains(name) && call[name].is_number_integer() && call[name] >= 0 &&
           call[name] < kernels;
  };
  const bool right =
      call.is_object() && call.contains("key") && has_kernel("kernel") && has_kernel("instead_of");
  if (!right) {
    refuse_json(label, "a key, the number of a kernel and that of the one it stands in for", call);
  }
  std::vector<int64_t> words = key.read(call["key"], label + ".key", words_);
  words.push_back(call["instead_of"].get<int64_t>());
  const int32_t known = keys_.add(words.data(), words.size());
  if (known < 0) {
    kernels_.emplace_back();
    calls_.push_back(nullptr);
  }
  const size_t place = known < 0 ? kernels_.size() - 1 : static_cast<size_t>(known);
  kernels_[place] = call["kernel"].get<int32_t>();
  calls_[place] = call;
}

int32_t TunedCalls::find(const CallState& state, const CallKey& key, size_t instead_of) const {
  int64_t words[CallKey::kMostWords + 1];
  const size_t count = key.write(state, words_, words);
  if (count == 0) return -1;
  words[count] = static_cast<int64_t>(instead_of);
  const int32_t found = keys_.find(words, count + 1);
  return found < 0 ? -1 : kernels_[static_cast<size_t>(found)];
}

}  // namespace torch_cubin
