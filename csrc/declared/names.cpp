// The names of a contract: see declared/pattern.h.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "declared/pattern.h"
#include "package/fields.h"

namespace torch_cubin {

using nlohmann::json;

Names::Names(const Schema& schema, const json* dtypes, std::string op)
    : schema_(schema), op_(std::move(op)) {
  for (const SchemaArgument& argument : schema.arguments) {
    const bool is_tensor =
        argument.type == ArgumentType::kTensor || argument.type == ArgumentType::kOptionalTensor;
    const bool is_number = !argument.is_tensor() && !argument.is_text();
    scope_.tensors.push_back(is_tensor ? argument.name : "");
    scope_.texts.push_back(argument.is_text() ? argument.name : "");
    scope_.numbers.emplace_back(is_number ? argument.name : "",
                                argument.is_float()  ? ValueType::kFloat
                                : argument.is_bool() ? ValueType::kBool
                                                     : ValueType::kInt);
  }
  for (const SchemaArgument& argument : schema.arguments) {
    int place = -1;
    if (argument.is_optional_number()) {
      place = static_cast<int>(scope_.numbers.size());
      scope_.numbers.emplace_back(argument.name + "?", ValueType::kBool);
    } else if (argument.type == ArgumentType::kTensorList) {
      place = add_size("len(" + argument.name + ")");
    }
    extras_.push_back(place);
  }
  if (dtypes == nullptr) return;
  if (!dtypes->is_object()) refuse_json(op_ + ": dtypes", "an object", *dtypes);
  for (const auto& item : dtypes->items()) {
    Variable variable;
    variable.name = item.key();
    ScalarType dtype{};
    if (!is_identifier(variable.name) || find_dtype(variable.name, &dtype)) {
      fail({"input", op_ + ": dtypes", "has a wrong variable", "a name that is no dtype's",
            "'" + printable(variable.name) + "'", ""});
    }
    if (!item.value().is_array() || item.value().empty()) {
      refuse_json(op_ + ": dtypes." + printable(variable.name), "a list of dtypes", item.value());
    }
    for (const json& name : item.value()) {
      if (!name.is_string() || !find_dtype(name.get<std::string>(), &dtype)) {
        refuse_json(op_ + ": dtypes." + printable(variable.name), "names of torch's dtypes", name);
      }
      variable.allowed.push_back(dtype);
    }
    variables_.push_back(std::move(variable));
  }
  check_capacity();
}

void Names::check_capacity() const {
  const bool fits = scope_.numbers.size() <= kMaxOpNumbers && groups_.size() <= kMaxOpVariables &&
                    variables_.size() <= kMaxOpVariables;
  if (fits) return;
  fail({"input", op_, "has too many names",
        std::to_string(kMaxOpNumbers) + " numbers and sizes, " + std::to_string(kMaxOpVariables) +
            " groups of dims and as many dtypes",
        "more", ""});
}

bool Names::is_argument(const std::string& name) const {
  return std::any_of(schema_.arguments.begin(), schema_.arguments.end(),
                     [&](const SchemaArgument& argument) { return argument.name == name; });
}

void Names::add_item(const std::string& list, const std::string& index) {
  const bool digits =
      !index.empty() && index.size() <= 5 &&
      std::all_of(index.begin(), index.end(), [](char c) { return c >= '0' && c <= '9'; }) &&
      (index == "0" || index[0] != '0');
  const std::string name = list + "[" + index + "]";
  for (size_t i = 0; digits && i < schema_.arguments.size(); ++i) {
    const SchemaArgument& argument = schema_.arguments[i];
    if (argument.name != list || argument.type != ArgumentType::kTensorList) continue;
    auto& tensors = scope_.tensors;
    if (scope_.find_tensor(name) >= 0) return;
    items_.push_back({i, std::stoul(index), tensors.size()});
    tensors.push_back(name);
    if (tensors.size() <= kMaxOpTensors) return;
    fail(
        {"input", op_, "names too many items of lists", "at most 64 with all outputs", "more", ""});
  }
}

void Names::add_items(const json& tree) {
  if (tree.is_string()) {
    const std::string text = tree.get<std::string>();
    const size_t open = text.find('[');
    if (open != std::string::npos && text.back() == ']') {
      add_item(text.substr(0, open), text.substr(open + 1, text.size() - open - 2));
    }
    return;
  }
  if (tree.is_array() && tree.size() == 3 && tree[0] == "pointer" && tree[1].is_string() &&
      tree[2].is_number_unsigned()) {
    add_item(tree[1].get<std::string>(), std::to_string(tree[2].get<uint64_t>()));
  }
  if (!tree.is_structured()) return;
  for (const json& part : tree) add_items(part);
}

int Names::find_group(const std::string& name) const {
  const auto found = std::find(groups_.begin(), groups_.end(), name);
  return found == groups_.end() ? -1 : static_cast<int>(found - groups_.begin());
}

int Names::add_size(const std::string& name) {
  scope_.numbers.emplace_back(name, ValueType::kInt);
  check_capacity();
  return static_cast<int>(scope_.numbers.size()) - 1;
}

int Names::add_group(const std::string& name) {
  groups_.push_back(name);
  check_capacity();
  return static_cast<int>(groups_.size()) - 1;
}

Names::Mark Names::mark() const {
  std::vector<bool> bound;
  bound.reserve(variables_.size());
  for (const Variable& variable : variables_) bound.push_back(variable.bound);
  return {groups_.size(), scope_.numbers.size(), std::move(bound)};
}

void Names::forget(const Mark& mark) {
  // The indices are not reused: in a call, the names of each pattern have indices of their own.
  for (size_t i = mark.groups; i < groups_.size(); ++i) groups_[i].clear();
  for (size_t i = mark.numbers; i < scope_.numbers.size(); ++i) scope_.numbers[i].first.clear();
  for (size_t i = 0; i < variables_.size(); ++i) variables_[i].bound = mark.variables[i];
}

}  // namespace torch_cubin
