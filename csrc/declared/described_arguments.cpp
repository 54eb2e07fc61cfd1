#include "declared/described_arguments.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "declared/pattern.h"

namespace torch_cubin {

const nlohmann::json& DescribedArguments::value(size_t i) const {
  return values_.at(schema_.arguments[i].name);
}

bool DescribedArguments::has_tensor(size_t i) const { return !value(i).is_null(); }

TensorView DescribedArguments::view(size_t i) {
  viewed_ = &value(i);
  return tensors_.view(*viewed_);
}

size_t DescribedArguments::length(size_t i) const { return value(i).size(); }

TensorView DescribedArguments::item(size_t i, size_t index) {
  viewed_ = &value(i).at(index);
  return tensors_.view(*viewed_);
}

Value DescribedArguments::number(size_t i) const {
  const nlohmann::json& given = value(i);
  if (given.is_null()) return {ValueType::kNone, 0, 0};
  if (schema_.arguments[i].is_float()) return Value::of(described_float(given));
  if (schema_.arguments[i].is_bool()) return Value::of(given.get<bool>());
  return Value::of(given.is_boolean() ? int64_t{given.get<bool>()} : given.get<int64_t>());
}

std::string_view DescribedArguments::text(size_t i) const {
  return value(i).get_ref<const std::string&>();
}

bool DescribedArguments::have_addresses() const {
  const auto has = [](const nlohmann::json& tensor) { return tensor.contains("address"); };
  for (size_t i = 0; i < schema_.arguments.size(); ++i) {
    const nlohmann::json& given = value(i);
    if (!schema_.arguments[i].is_tensor() || given.is_null()) continue;
    const bool right = given.is_array() ? std::all_of(given.begin(), given.end(), has) : has(given);
    if (!right) return false;
  }
  return true;
}

const void* DescribedArguments::data(const TensorView&) const {
  const auto found = viewed_->find("address");
  const uintptr_t address = found == viewed_->end() ? kMaxAlign : found->get<uintptr_t>();
  return reinterpret_cast<const void*>(address);
}

}  // namespace torch_cubin
