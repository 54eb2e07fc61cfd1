#include "declared/kernel_lookup.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "cubin/error.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

constexpr size_t kMostParts = 16;  // of a key

// One part of a condition that says "this expression has that value".
struct Equality {
  json part;   // in TunedTable's form
  json value;  // a number, a bool or a string
};

bool is_operation(const json& tree, const char* name, size_t size) {
  return tree.is_array() && tree.size() == size && tree[0] == name;
}

void flatten(const json& tree, std::vector<const json*>& parts) {
  if (is_operation(tree, "and", 3)) {
    flatten(tree[1], parts);
    flatten(tree[2], parts);
  } else {
    parts.push_back(&tree);
  }
}

bool is_truth_leaf(const json& tree) {
  return is_operation(tree, "number", 2) || is_operation(tree, "defined", 2) ||
         is_operation(tree, "contiguous", 2);
}

bool as_equality(const json& tree, const Scope& scope, const std::string& label, Equality& out) {
  if (is_operation(tree, "is", 3)) {
    out = {{"text", tree[1]}, tree[2]};
    return true;
  }
  if (is_operation(tree, "is_dtype", 3)) {
    out = {{"dtype", tree[1]}, tree[2]};
    return true;
  }
  if (is_truth_leaf(tree)) {
    out = {tree, true};
    return true;
  }
  if (is_operation(tree, "not", 2) && is_truth_leaf(tree[1])) {
    out = {tree[1], false};
    return true;
  }
  if (!is_operation(tree, "eq", 3)) return false;
  const bool swapped = tree[1].is_number_integer();
  const json& value = tree[swapped ? 1 : 2];
  const json& part = tree[swapped ? 2 : 1];
  if (!value.is_number_integer() || !part.is_array()) return false;
  if (Expression(part, scope, label).type() != ValueType::kInt) return false;
  out = {part, value};
  return true;
}

// The actual value that an unmet part of a condition reads: "head_dim = 96".
std::string read_value(const json& tree, const Scope& scope, const CallState& state) {
  if (is_operation(tree, "is", 3) || is_operation(tree, "is_dtype", 3)) {
    const std::string name = tree[1].get<std::string>();
    if (tree[0] == "is") {
      const auto place = static_cast<size_t>(scope.find_text(name));
      return name + " = '" + std::string(state.texts[place]) + "'";
    }
    const TensorFacts& tensor = state.facts[static_cast<size_t>(scope.find_tensor(name))];
    return tensor.defined ? name + ".dtype = " + tensor.dtype : name + " = None";
  }
  const json* part = &tree;
  bool compares = false;
  for (const char* operation : {"eq", "ne", "lt", "le"}) {
    compares |= is_operation(tree, operation, 3);
  }
  if (compares) part = &tree[tree[1].is_array() ? 1 : 2];
  if (is_operation(tree, "not", 2)) part = &tree[1];
  const Expression expression(*part, scope, "a condition");
  return expression.text() + " = " + expression.evaluate(state.arguments()).text();
}

}  // namespace

KernelLookup::KernelLookup(const std::vector<const json*>& conditions, const Scope& scope,
                           const std::string& label) {
  // The kernels by compared expression and value.
  std::map<json, std::map<json, std::vector<int32_t>>> found;
  for (size_t i = 0; i < conditions.size(); ++i) {
    std::map<json, json> values;  // the first value of a part; the call evaluates any second one
    if (conditions[i] != nullptr) {
      std::vector<const json*> parts;
      flatten(*conditions[i], parts);
      for (const json* part : parts) {
        Equality equality;
        if (values.size() < kMostParts && as_equality(*part, scope, label, equality)) {
          values.emplace(std::move(equality.part), std::move(equality.value));
        }
      }
    }
    json key = json::array(), value = json::array();
    for (auto& entry : values) {
      key.push_back(entry.first);
      value.push_back(std::move(entry.second));
    }
    found[key][value].push_back(static_cast<int32_t>(i));
  }
  // The tables that skip most kernels; the conditions of the others are evaluated one by one.
  std::vector<std::pair<size_t, const json*>> order;
  for (const auto& entry : found) {
    size_t count = 0;
    for (const auto& list : entry.second) count += list.second.size();
    order.emplace_back(entry.first.empty() ? 0 : count, &entry.first);
  }
  std::sort(order.begin(), order.end(),
            [](const auto& a, const auto& b) { return a.first > b.first; });
  for (size_t i = 0; i < order.size(); ++i) {
    const json& key = *order[i].second;
    auto& values = found[key];
    if (i >= kMostTables || key.empty()) {
      for (const auto& entry : values) {
        others_.insert(others_.end(), entry.second.begin(), entry.second.end());
      }
      continue;
    }
    Table table;
    json entries = json::array();
    for (auto& entry : values) {
      entries.push_back({entry.first, table.kernels.size()});
      table.kernels.push_back(std::move(entry.second));
    }
    const json object = {
        {"key", key}, {"entries", std::move(entries)}, {"otherwise", table.kernels.size()}};
    table.kernels.emplace_back();  // for values of no kernel
    table.keys.emplace(object, scope, static_cast<int64_t>(table.kernels.size()), label);
    tables_.push_back(std::move(table));
  }
  std::sort(others_.begin(), others_.end());
}

bool KernelLookup::look_up(const CallState& state, const std::vector<int32_t>** lists,
                           size_t* count) const {
  // A part of a key may have no value (the size of a dim that the tensor does not have) if
  // conditions check something else first.
  try {
    for (const Table& table : tables_) {
      lists[(*count)++] = &table.kernels[static_cast<size_t>(table.keys->find(state))];
    }
  } catch (const Error&) {
    return false;
  }
  lists[(*count)++] = &others_;
  return true;
}

KernelLookup::Difference KernelLookup::difference(const json& condition, const Scope& scope,
                                                  const CallState& state) {
  Difference out;
  std::vector<const json*> parts;
  flatten(condition, parts);
  for (const json* part : parts) {
    const Expression expression(*part, scope, "a condition");
    try {
      if (expression.evaluate(state.arguments()).integer != 0) continue;
      const std::string got = read_value(*part, scope, state);
      if (std::find(out.got.begin(), out.got.end(), got) == out.got.end()) out.got.push_back(got);
    } catch (const Error&) {
      // A condition without a value for these arguments does not hold.
    }
    ++out.parts;
    out.expected += (out.expected.empty() ? "" : " and ") + expression.text();
  }
  return out;
}

}  // namespace torch_cubin
