#include "declared/requirement.h"

#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "package/fields.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

constexpr int64_t kMaxMultiple = int64_t{1} << 20;

// Whether two numbers are equal. A bool does not count as a number.
bool equal(const Value& a, const Value& b) {
  if ((a.type == ValueType::kBool) != (b.type == ValueType::kBool)) return false;
  if (a.type == ValueType::kFloat || b.type == ValueType::kFloat) {
    return a.as_number() == b.as_number();
  }
  return a.integer == b.integer;
}

}  // namespace

Requirement::Requirement(const json& object, const Scope& scope, const std::string& label) {
  Fields fields(object, label);
  argument_ = printable(fields.text("argument"));
  if (fields.find("address_of") != nullptr) {
    const int found = scope.find_tensor(fields.text("address_of"));
    if (found < 0) {
      refuse_json(fields.at("address_of"), "a tensor argument of the op", fields.get("address_of"));
    }
    kind_ = Kind::kAddress;
    tensor_ = static_cast<size_t>(found);
    least_ = fields.integer("multiple_of", 1, kMaxMultiple);
    fields.finish();
    return;
  }
  value_.emplace(fields.get("value"), scope, fields.at("value"));
  const ValueType type = value_->type();
  if (const json* equals = fields.find("equals")) {
    kind_ = Kind::kEquals;
    const bool right = type == ValueType::kBool  ? equals->is_boolean()
                       : type == ValueType::kInt ? equals->is_number_integer()
                                                 : equals->is_number();
    if (!right) refuse_json(fields.at("equals"), "a value of the type of 'value'", *equals);
    equals_ = Expression(*equals, scope, fields.at("equals")).evaluate({});
  } else {
    if (type != ValueType::kInt) refuse_json(fields.at("value"), "an integer", fields.get("value"));
    if (fields.find("multiple_of") != nullptr) {
      kind_ = Kind::kMultiple;
      least_ = fields.integer("multiple_of", 1, kMaxMultiple);
    } else {
      kind_ = Kind::kRange;
      least_ = fields.integer("at_least", INT64_MIN, INT64_MAX);
      most_ = fields.integer("at_most", least_, INT64_MAX);
    }
  }
  fields.finish();
}

bool Requirement::holds(const CallState& state) const {
  if (kind_ == Kind::kAddress) {
    const auto address = reinterpret_cast<uintptr_t>(state.addresses[tensor_]);
    return address % static_cast<uintptr_t>(least_) == 0;  // null passes
  }
  const Value value = value_->evaluate(state.arguments());
  switch (kind_) {
    case Kind::kMultiple:
      return value.integer % least_ == 0;
    case Kind::kEquals:
      return equal(value, equals_);
    default:
      return value.integer >= least_ && value.integer <= most_;
  }
}

std::string Requirement::expected() const {
  const std::string start = "argument '" + argument_ + "' ";
  switch (kind_) {
    case Kind::kAddress:
      return start + "at an address that is a multiple of " + std::to_string(least_);
    case Kind::kMultiple:
      return start + "a multiple of " + std::to_string(least_);
    case Kind::kEquals:
      return start + "such that " + value_->text() + " is " + equals_.text();
    default:
      return start + "from " + std::to_string(least_) + " to " + std::to_string(most_);
  }
}

std::string Requirement::got(const CallState& state) const {
  if (kind_ == Kind::kAddress) {
    const auto address = reinterpret_cast<uintptr_t>(state.addresses[tensor_]);
    return "an address " + counted(address % static_cast<uintptr_t>(least_), "byte") + " past one";
  }
  return value_->evaluate(state.arguments()).text();
}

}  // namespace torch_cubin
